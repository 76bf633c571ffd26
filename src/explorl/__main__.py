"""`python -m explorl` is the command `explorl`."""

from explorl.cli import main

main()
