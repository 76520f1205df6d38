import sys

from warpwatch_daemon.cli import main

sys.exit(main())
