import sys

from tpukit_tools.cli import main

sys.exit(main())
