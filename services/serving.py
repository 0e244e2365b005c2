"""A serving process, for containers and schedulers: `streamtrain serve`, configured by environment or file.

STREAMTRAIN_PUBLISH__URL=redis://redis:6379 python services/serving.py --model model.py:model --listen 0.0.0.0:8501
"""

import sys

from streamtrain.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    main()
