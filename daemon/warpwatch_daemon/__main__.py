import sys

from warpwatch.daemon.cli import main

sys.exit(main())
