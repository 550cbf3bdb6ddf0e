"""Chat with a model, by default with the newest run's:

python generate/chat.py --checkpoint_dir DIR
"""

from litft.cli import run

if __name__ == "__main__":
    run("chat")
