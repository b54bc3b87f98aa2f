"""An attach while the broker is being restarted waits for it, within its connect timeout, and says so where that is over."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.brokers.conftest import PATIENCE_S, Setup
from tllm_core import SamplingParams, TransportError
from tllm_core.engines.echo import expected_tokens


def test_an_attach_waits_for_a_broker_that_is_restarted(broker: Setup) -> None:
    owned = broker.shared(settings={"liveness.broker_down_after_s": PATIENCE_S})
    patience = {f"transport.{broker.name}.connect_timeout_s": PATIENCE_S}
    broker.server.kill()
    with ThreadPoolExecutor(1) as pool:
        attaching = pool.submit(broker.attach, owned, settings=patience)
        with pytest.raises(TimeoutError):
            attaching.result(1.0)
        broker.server.restart()
        attached = attaching.result(PATIENCE_S)
    assert attached.generate([5, 6], SamplingParams(max_tokens=9)).outputs[0].token_ids == expected_tokens([5, 6], 9)


def test_an_attach_to_a_broker_that_stays_away_ends_with_the_connect_timeout_and_names_it(broker: Setup) -> None:
    owned = broker.shared(settings={"liveness.broker_down_after_s": PATIENCE_S})
    broker.server.kill()
    began = time.monotonic()
    with pytest.raises(TransportError, match=broker.server.address):
        broker.attach(owned, settings={f"transport.{broker.name}.connect_timeout_s": 0.5})
    assert 0.5 <= time.monotonic() - began < PATIENCE_S / 2
    broker.server.restart()
