"""Run the command `explorl` as `python -m explorl`."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # import paths can still name modules there (`explorl.core.plugins.working_folder`)

from explorl.cli.app import main

main()
