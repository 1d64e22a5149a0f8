"""Holds JSON against the schemas in docs/schemas."""

import json
from functools import cache
from pathlib import Path

from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).parent.parent / "docs" / "schemas"


@cache
def validator(name: str) -> Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def check(name: str, text: str | bytes) -> dict[str, object]:
    """The one JSON object in `text`, which must be as a schema says."""
    facts = json.loads(text)
    wrong = [f"{error.json_path}: {error.message:.200}" for error in validator(name).iter_errors(facts)]
    assert not wrong, "\n".join(wrong)
    return facts
