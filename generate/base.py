"""Complete a prompt, or every prompt of a file.

python generate/base.py --checkpoint_dir DIR --prompt "Once upon a time"
"""

from litft.cli import run

if __name__ == "__main__":
    run("generate")
