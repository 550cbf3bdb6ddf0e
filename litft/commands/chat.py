"""The command `chat`: a conversation in the terminal."""

import sys

from litft.args import ChatArgs
from litft.data.tool_files import read_tool_file
from litft.inference.chat import INITIAL_CAPACITY, Chat, Conversation
from litft.inference.session import make_drafter, missing_template_note, open_session
from litft.inference.terminal import make_screen


def chat(args: ChatArgs) -> None:
    """Chat over several turns; without a terminal, read one message per line and print only the
    answers."""
    tools = read_tool_file(args.tools) if args.tools else None
    screen = make_screen()
    # what is typed meanwhile becomes the first messages
    with screen.loading():
        session = open_session(args)
        session.tokenizer.check_tools(tools)
        session.limit_threads(1)
        note = missing_template_note(session.tokenizer)
        if note:
            print(note, file=sys.stderr)
        drafter = make_drafter(args, session, INITIAL_CAPACITY)
    conversation = Conversation(session, drafter, args.system, tools)
    Chat(conversation, screen, args.debug).run()
