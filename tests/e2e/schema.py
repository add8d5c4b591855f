"""Checks documents against the JSON Schemas in docs/schemas, as far as these use JSON Schema."""

import json
import os

from support import TOP, read_json

SCHEMAS = os.path.join(TOP, "docs", "schemas")
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
         "integer": int, "number": (int, float)}
# Documents that the files of fixtures/compat do not show: other suites check them.
ELSEWHERE = {"bcow.cache-list-1", "bcow.cache-prune-1", "bcow.cache-verify-1",
             "bcow.convert-index-1", "bcow.pool-stats-1", "bcow.resolve-1"}
KNOWN = {"$schema", "title", "type", "const", "properties", "required", "items"}


def of(name):
    """The schema of documents with this name, as bcow.ps/1."""
    return read_json(os.path.join(SCHEMAS, name.replace("/", "-") + ".json"))


def checked(text):
    """The document in a text; fails if its schema refuses it."""
    document = json.loads(text)
    found = list(problems(document, of(document["schema"])))
    if found:
        raise AssertionError(f"{document['schema']}: {found}")
    return document


def problems(value, schema, at=""):
    """What is wrong with a document."""
    unknown = schema.keys() - KNOWN
    if unknown:
        raise AssertionError(f"the check does not know {unknown}")
    types = schema.get("type", list(TYPES))
    types = [types] if isinstance(types, str) else types
    is_of_type = any(isinstance(value, TYPES[one]) and
                     (not isinstance(value, bool) or one == "boolean") for one in types)
    if not is_of_type:
        yield f"{at} is {value!r}, and not {' or '.join(types)}"
    if "const" in schema and value != schema["const"]:
        yield f"{at} is {value!r}, and not {schema['const']!r}"
    if isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{at}.{name} is missing"
        for name, below in schema.get("properties", {}).items():
            if name in value:
                yield from problems(value[name], below, f"{at}.{name}")
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from problems(one, schema.get("items", {}), f"{at}[{number}]")
