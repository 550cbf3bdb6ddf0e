"""Chat with a model in the terminal. Default: the model of the newest run.

python generate/chat.py --checkpoint_dir DIR
"""

from litft.cli import run

if __name__ == "__main__":
    run("chat")
