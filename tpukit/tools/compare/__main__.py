"""A fresh process that measures one batch size: what to do comes on stdin, the answer goes into the folder that is named."""

import signal
import sys
from pathlib import Path

from tpukit.host.errors import TpukitError
from tpukit.tools.compare.measuring import SAID, answer

try:
    answer(Path(sys.argv[1]))
except TpukitError as error:
    sys.exit(f"{SAID}{error}")
except KeyboardInterrupt:
    sys.exit(128 + signal.SIGINT)
