"""A worker process, for containers and schedulers: `streamtrain worker`, configured by environment or file.

STREAMTRAIN_PS__ADDRESSES=ps-0:2222,ps-1:2222 python services/worker.py --model model.py:model --topic clicks
"""

import sys

from streamtrain.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "worker")
    main()
