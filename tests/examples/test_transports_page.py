"""docs/transports.md says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tllm_core.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "transports.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| `?\"?([^|\"` ]*)[^|]*\|", re.MULTILINE)


@pytest.mark.parametrize("name", ["zmq", "nats", "redis"])
def test_every_option_is_in_the_table_with_its_default(name: str) -> None:
    table = PAGE.partition(f"\n### {name}\n")[2].partition("\n###")[0]
    fields = msgspec.structs.fields(Registry().transport(name).settings_type)
    assert dict(ROW.findall(table)) == {
        field.name: "" if field.default is None else str(field.default) for field in fields
    }


def test_the_least_login_of_the_page_is_the_one_of_the_walk_through() -> None:
    rights = re.search(r"~tllm:\*( [+-][@a-z|]+)+", PAGE)
    assert rights is not None
    assert rights[0] in (ROOT / "examples" / "two_hosts_redis" / "README.md").read_text(encoding="utf-8")
