"""The coordinator process, for containers and schedulers: `streamtrain coordinator`, configured by environment or file.

STREAMTRAIN_PS__ADDRESSES=ps-0:2222 STREAMTRAIN_COORDINATOR__ADDRESS=coordinator:2220 python services/coordinator.py
"""

import sys

from streamtrain.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "coordinator")
    main()
