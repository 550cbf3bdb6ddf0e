"""Print the flags of a command as JSON Schema, for editors and programs.

python scripts/schema.py > lora.schema.json
"""

from litft.cli import run

if __name__ == "__main__":
    run("schema")
