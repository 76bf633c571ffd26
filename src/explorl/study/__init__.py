"""Studies: arms × seeds, a process each, and then one table with intervals. `explorl.study.run_study.run_study` runs one."""
