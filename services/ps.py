"""A parameter server process, for containers and schedulers: `streamtrain ps`, configured by environment or file.

STREAMTRAIN_PS__ADDRESSES=ps-0:2222,ps-1:2222 python services/ps.py --index 0
TF_CONFIG='{"cluster": {"ps": […], "worker": […]}, "task": {"type": "ps", "index": 0}}' python services/ps.py
"""

import sys

from streamtrain.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "ps")
    main()
