"""Tokenize a data set and print its statistics and samples. No GPU is needed.

python scripts/prepare_data.py --checkpoint_dir DIR --data.path FILE
"""

from litft.cli import run

if __name__ == "__main__":
    run("prepare_data")
