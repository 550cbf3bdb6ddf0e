"""Serve a model to clients of the OpenAI API, with a chat page, by default the newest run's:

python generate/serve.py --checkpoint_dir DIR
"""

from litft.cli import run

if __name__ == "__main__":
    run("serve")
