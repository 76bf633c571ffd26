"""Studies: arms × seeds, a process each, and then one table with intervals. `explorl.study.run.run_study` runs one."""
