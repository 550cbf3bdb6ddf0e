"""Tokenize a data set, and look at it before a GPU is paid for:

python scripts/prepare_data.py --checkpoint_dir DIR --data.path FILE
"""

from litft.cli import run

if __name__ == "__main__":
    run("prepare_data")
