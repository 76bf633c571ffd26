"""`python -m explorl` is the command `explorl`."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # a module there is imported where something names it (`explorl.core.plugins.working_folder`)

from explorl.cli.app import main

main()
