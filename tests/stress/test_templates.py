"""Chat templates that fail, loop or fill the memory: one message within seconds."""

import time

import pytest

from litft.data.chat_template import render

MESSAGES = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
] * 3
LOOPS = (
    "".join(f"{{% for m{n} in messages %}}" for n in range(15)) + "x" + "{% endfor %}" * 15
)
DOUBLING = "{% set s = namespace(t='abc') %}{% for n in range(60) %}{% set s.t = s.t + s.t %}{% endfor %}"
DOUBLED_BLOCK = "{% set s %}abc{% endset %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60
BROKEN = {
    "a negative length": "{{ messages[0].content | truncate(-1) }}",
    "a cycler without items": "{{ cycler() }}",
    "groups by a number": "{{ messages | groupby(5) | list }}",
    "a division by 0": "{{ 1 / 0 }}",
    "an infinite recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nested loops": LOOPS,
    "a doubled text": DOUBLING,
    "a doubled block": DOUBLED_BLOCK,
    "a text a billion times": "{{ 'abc' * 10 ** 9 }}",
    "a list a billion times": "{{ ([1] * 10 ** 9) | length }}",
    "a huge power": "{{ 7 ** (10 ** 9) }}",
    "a huge width": "{{ '%1000000000d' % 5 }}",
    "a width as a value": "{{ '%*d' % (1000000000, 5) }}",
    "a centred text": "{{ 'a' | center(10 ** 10) }}",
    "a method's width": "{{ 'a'.ljust(10 ** 10) }}",
    "an indentation": "{{ 'a' | indent(10 ** 10, true) }}",
    "a long range": "{% for n in range(10 ** 9) %}{% endfor %}",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_templates(name):
    start = time.monotonic()
    with pytest.raises(
        ValueError, match="the chat template cannot render this conversation"
    ):
        render(BROKEN[name], MESSAGES)
    assert time.monotonic() - start < 10


def test_long_conversations_stay_within_the_bounds():
    """Also with a template that compares every message with every other one."""
    template = (
        "{% for m in messages %}{% for n in messages if n is sameas m %}{{ loop.length }}{% endfor "
        "%}{% endfor %}"
    )
    messages = [{"role": "user", "content": f"{number}"} for number in range(1000)]
    assert render(template, messages) == "1" * 1000
