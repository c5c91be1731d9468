import sys

from tpukit.cli import main

sys.exit(main())
