"""Serve a model over the OpenAI API and a chat page. Default: the model of the newest run.

python generate/serve.py --checkpoint_dir DIR
"""

from litft.cli import run

if __name__ == "__main__":
    run("serve")
