"""A long prompt does not keep the requests of others waiting, and no prompt waits for ever."""

import sys
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

import pytest
from server_process import copy_with_context

from litft.args import Sampling, ServeArgs
from litft.inference.generation import Batch, Request, generate_batch
from litft.inference.session import open_sessions, source_of
from litft.serving.engine import Engine, Failed, Overloaded
from litft.serving.prefill_turns import PrefillTurns
from litft.serving.routes import as_api_error

LONG = [7 + number % 300 for number in range(3000)]
SHORT = [9, 8, 7]


@pytest.fixture(scope="module")
def session(checkpoints, tmp_path_factory):
    folder = copy_with_context(
        checkpoints["stories"], tmp_path_factory.mktemp("turns") / "stories", 4096
    )
    args = ServeArgs(checkpoint_dir=folder, precision="fp32")
    return open_sessions(args, [source_of(args)])[0]


def request(ids, tokens=4):
    return Request(ids, tokens, Sampling(temperature=0.0))


def test_a_short_request_ends_before_a_long_prompt(session):
    """It came later. Both have the tokens that they have alone."""
    engine = Engine({"model": session}, rows=3, capacity=4096, max_waiting=0)
    engine.start()
    order = []
    done = SimpleQueue()
    tokens = {}

    def deliver(name):
        def append(chunk):
            tokens.setdefault(name, []).extend(chunk.tokens)
            order.append(name)
            if chunk.finish_reason:
                done.put(name)

        return append

    engine.submit(
        "model", [(request(LONG), deliver("long")), (request(SHORT), deliver("short"))]
    )
    assert [done.get(timeout=60), done.get(timeout=60)] == ["short", "long"]
    assert order.index("long") > order.index("short")
    engine.stop()
    engine.join()
    for name, ids in (("long", LONG), ("short", SHORT)):
        chunks = generate_batch(session.decoder(1, 4096), session.tokenizer, [request(ids)])
        assert tokens[name] == [token for _, chunk in chunks for token in chunk.tokens]


def test_a_request_admitted_before_a_failure_is_told_of_it(session, monkeypatch):
    """A request is admitted after the first part of a long prompt; computing the second part
    fails."""
    engine = Engine({"model": session}, rows=2, capacity=4096, max_waiting=0)
    ended = SimpleQueue()
    prefill = PrefillTurns.prefill

    def failing(turns, batch, row):
        if turns.seconds:
            raise RuntimeError("out of memory")
        tokens = prefill(turns, batch, row)
        engine.submit(
            "model", [(request(SHORT), lambda chunk: ended.put(("short", chunk)))]
        )
        return tokens

    monkeypatch.setattr(PrefillTurns, "prefill", failing)
    engine.start()
    engine.submit("model", [(request(LONG), lambda chunk: ended.put(("long", chunk)))])
    errors = dict(ended.get(timeout=10) for _ in range(2))
    engine.stop()
    engine.join()
    assert {name: str(error) for name, error in errors.items()} == {
        "long": "out of memory",
        "short": "out of memory",
    }


def test_requests_that_arrive_at_any_moment_do_not_end_the_engine(session):
    """Threads change after 10 microseconds, so that requests arrive while the engine chooses the
    next one."""
    count = 400
    engine = Engine({"model": session}, rows=4, capacity=64, max_waiting=60)
    chunks = SimpleQueue()

    def send():
        sent = 0
        while sent < count and engine.alive:
            with suppress(Overloaded):
                engine.submit("model", [(request([7 + sent % 300], 1), chunks.put)])
                sent += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        engine.start()
        sender = Thread(target=send)
        sender.start()
        answers = [chunks.get(timeout=10) for _ in range(count)]
        sender.join()
    finally:
        sys.setswitchinterval(interval)
    engine.stop()
    engine.join()
    assert [chunk for chunk in answers if isinstance(chunk, Exception)] == []


def test_an_engine_that_has_failed_says_so(session, monkeypatch):
    """It is not shutting down: it has to be started again."""
    engine = Engine({"model": session}, rows=1, capacity=64, max_waiting=4)
    chunks = SimpleQueue()
    monkeypatch.setattr(engine, "_admit", lambda: 1 // 0)
    engine.submit("model", [(request(SHORT), chunks.put)])
    engine.start()
    assert isinstance(chunks.get(timeout=60), ZeroDivisionError)
    engine.join()
    with pytest.raises(Failed) as raised:
        engine.submit("model", [(request(SHORT), chunks.put)])
    error = as_api_error(raised.value)
    assert (error.status, error.body["error"]["code"]) == (503, "failed")


@pytest.fixture
def batch(session):
    return Batch(session.decoder(4, 4096), session.tokenizer)


def test_new_and_begun_prompts_take_turns(batch):
    """A stream of short requests does not keep a long one waiting."""
    turns = PrefillTurns()
    batch.add(0, request(LONG))
    long_row = next(iter(batch.prefilling))
    turns.prefill(batch, long_row)
    served = []
    for number in range(1, 7):
        batch.add(number, request([10 + number, *SHORT]))
        row = turns.next_row(batch)
        served.append(batch.prefilling[row].number)
        turns.owed = 0.0
        turns.prefill(batch, row)
        for running in list(batch.running.values()):
            batch.cancel(running[0])
        for row, prompt in list(batch.prefilling.items()):
            if prompt.number:
                del batch.prefilling[row]
    assert served == [1, 0, 3, 0, 5, 0]


def test_prefill_and_younger_answers_have_equal_time(batch):
    turns = PrefillTurns()
    batch.add(0, request(LONG))
    batch.add(1, request(SHORT, 50))
    long_row, short_row = batch.prefilling
    turns.prefill(batch, long_row)
    turns.prefill(batch, short_row)
    turns.seconds = {0: 2.0, 1: 0.1}
    turns.tokens_per_second = 1000.0
    turns.owed = 1.0
    assert turns.next_row(batch) is None
    assert turns.slice_tokens(batch, long_row) < 512
    turns.decoded([1], 0.6)
    assert turns.next_row(batch) is None
    turns.decoded([1], 0.6)
    assert turns.next_row(batch) == long_row
    # an answer that has had more time waits
    turns.seconds = {0: 2.0, 1: 3.0}
    turns.owed = 1.0
    assert turns.next_row(batch) == long_row
    assert turns.slice_tokens(batch, long_row) == 512


def test_equal_prompts_are_computed_once(batch):
    """The choices of one request copy the cache of the first."""
    turns = PrefillTurns()
    for number in range(3):
        batch.add(number, request(LONG))
    computed = 0
    while batch.prefilling:
        computed += turns.prefill(batch, turns.next_row(batch))
    assert computed < len(LONG) + 10
