"""JSON Schemas in the dialect of the matcher, which refuses what it cannot do instead of ignoring it.

Keywords that it lacks are rewritten into those it has wherever that is exact, or leaves only a part of the valid documents.
What remains is refused by name. (The other common matcher, xgrammar, is no way out: see docs/design.md.)
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator

from sgla.grammar.errors import GrammarError
from sgla.grammar.logic import ASSERTIONS, Find, Json, Object, apart, opposite

ONE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
COUNTS = (
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
)
IN_PLACE = ("$dynamicRef", "$ref", "allOf", "anyOf", "dependentSchemas", "if", "not", "oneOf")
TYPES = ("array", "boolean", "null", "number", "object", "string")
ANYTHING: tuple[Json, ...] = (True, {})

# Formats of OpenAPI and of schema generators that say what a value means, not what it looks like.
MEANINGS = frozenset(
    [
        "base64url",
        "binary",
        "byte",
        "color",
        "decimal",
        "directory-path",
        "double",
        "file-path",
        "float",
        "json",
        "json-string",
        "new-path",
        "password",
        "path",
        "phone",
    ]
)
BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
BOUNDS = {name: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for name, bits in BITS.items()} | {
    f"u{name}": (0, 2**bits - 1) for name, bits in BITS.items()
}
LARGEST = 2**63 - 1024  # integer that the matcher takes as a bound; it computes them as float64
# A narrower format that exists, for one that does not.
NARROWER = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}
_CHAR = r"([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
# RFC 3986: without a scheme, the first segment has no colon; behind a slash it is not empty.
_PATH = rf"(/|/?{_CHAR.replace(':', '')}+(/{_CHAR}*)*)?"
RELATIVE = rf"^{_PATH}(\?({_CHAR}|[/?])*)?(#({_CHAR}|[/?])*)?$"
# RFC 6570, of ASCII characters.
_LITERAL = r"([!#$&(-;=?-\[\]_a-z~]|%[0-9A-Fa-f]{2})"
_VARIABLE = r"([A-Za-z0-9_]|%[0-9A-Fa-f]{2})(\.?([A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*(:[1-9][0-9]{0,3}|\*)?"
TEMPLATE = rf"^({_LITERAL}|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*$"
# RFC 3339, of which the matcher's dates have a 29 February in every year, and its times a leap second in every minute.
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_HOUR = "([01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]{_HOUR}:[0-5][0-9])"
PATTERNS: dict[str, Json] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[Tt]{_TIME}$"},
    "json-pointer": {"pattern": "^(/([^/~]|~[01])*)*$"},
    "relative-json-pointer": {"pattern": "^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$"},
    "uri-template": {"pattern": TEMPLATE},
    "uri-reference": {"anyOf": [{"format": "uri"}, {"pattern": RELATIVE}]},
    "iri-reference": {"anyOf": [{"format": "uri"}, {"pattern": RELATIVE}]},
}
# Formats that the matcher has itself.
OWN = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"]
)
FORMATS = MEANINGS | OWN | BOUNDS.keys() | NARROWER.keys() | PATTERNS.keys()
LISTED = 10  # values of a set
SETS = 1024  # arrays that a set of listed values may be
BRANCHES = 32  # of a oneOf
WAYS = 64  # in which a branch of a oneOf may differ from the others


def adapt(schema: Json, find: Find | None = None) -> Json:
    """An equivalent schema that the matcher can honour, as far as there is one. Raises GrammarError.

    ``find`` resolves references; None: ``schema`` is the whole document.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema is an object or a boolean, got {json.dumps(schema)[:40]}")
    find = find or Find(schema)
    out = {key: _inside(key, value, find) for key, value in schema.items()}
    for rule in RULES:
        rule(out)
    for exact in EXACT:
        exact(out, schema, find)
    return out


def object_schema(schema: Json) -> Object:
    """The same as an object. Raises GrammarError for the schema that nothing fits."""
    if schema is False:
        raise GrammarError("no document fits the schema false")
    return {} if schema is True else schema


def _inside(key: str, value: Json, find: Find) -> Json:
    if key == "propertyNames" and isinstance(value, dict) and set(value) == {"$ref"}:
        value = find(value["$ref"]) or value
    if key in ONE:
        return [adapt(item, find) for item in value] if isinstance(value, list) else adapt(value, find)
    if key in MAPS and isinstance(value, dict):
        return {name: adapt(item, find) for name, item in value.items()}
    if key in LISTS and isinstance(value, list):
        return [adapt(item, find) for item in value]
    if key in COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def where(schema: Json, keyword: str, path: str = "", value: Json = None) -> str | None:
    """JSON pointer of the first schema that has ``keyword``, with ``value`` if that is given; None if none has."""
    if not isinstance(schema, dict):
        return None
    if keyword in schema and value in (None, schema[keyword]):
        return path or "/"
    for step, item in _children(schema):
        found = where(item, keyword, f"{path}/{step}", value)
        if found is not None:
            return found
    return None


def _children(schema: Object) -> Iterator[tuple[str, Json]]:
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            yield from ((f"{key}/{name}", item) for name, item in value.items())
        elif key in (*ONE, *LISTS):
            if isinstance(value, list):
                yield from ((f"{key}/{i}", item) for i, item in enumerate(value))
            else:
                yield key, value


def _also(schema: Object, *more: Json) -> None:
    """Every one of ``more`` must hold, too."""
    schema["allOf"] = [*schema.get("allOf", []), *more]


def _is_object(schema: Object) -> bool:
    return schema.get("type") in ("object", ["object"])


def _absent(*names: str) -> Object:
    return {"properties": dict.fromkeys(names, False)}


# Rules: each changes the schema in place or leaves it alone. Subschemas are done. ------------------------------------


def _drop_idle(schema: Object) -> None:
    """Keywords that forbid nothing."""
    if "if" in schema and not ("then" in schema or "else" in schema):
        del schema["if"]
    if "if" not in schema:
        _drop(schema, "then", "else")
    if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
        _drop(schema, "contains", "minContains", "maxContains")
    few = schema.get("maxItems", 2)
    if schema.get("uniqueItems") is False or (isinstance(few, int) and few <= 1):
        _drop(schema, "uniqueItems")
    for key in ("unevaluatedItems", "unevaluatedProperties", "propertyNames"):
        if key in schema and schema[key] in ANYTHING:
            del schema[key]
    if schema.get("propertyNames") == {"type": "string"}:
        del schema["propertyNames"]
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        if schema.get(key) == {}:
            del schema[key]
    if schema.get("not") is False:
        del schema["not"]


def _drop(schema: Object, *keys: str) -> None:
    for key in keys:
        schema.pop(key, None)


def _close(schema: Object) -> None:
    """Nothing beside these keywords evaluates anything: unevaluated is what is additional."""
    if any(key in schema for key in IN_PLACE):
        return
    for unevaluated, additional in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "additionalItems" if isinstance(schema.get("items"), list) else "items"),
    ):
        if unevaluated in schema and not (unevaluated == "unevaluatedItems" and "contains" in schema):
            value = schema.pop(unevaluated)
            schema.setdefault(additional, value)


def _split_dependencies(schema: Object) -> None:
    """Draft 7's form of two keywords."""
    dependencies = schema.pop("dependencies", None)
    if not isinstance(dependencies, dict):
        return
    for name, value in dependencies.items():
        key = "dependentRequired" if isinstance(value, list) else "dependentSchemas"
        schema[key] = schema.get(key, {}) | {name: value if isinstance(value, list) else adapt(value)}


def _depend(schema: Object) -> None:
    """The property is absent, or what depends on it holds."""
    if "$ref" in schema:
        return
    required = schema.get("required", [])
    for name, others in schema.pop("dependentRequired", {}).items():
        if name in required:
            schema["required"] = required = list(dict.fromkeys([*required, *others]))
        elif others:
            _also(schema, {"anyOf": [_absent(name), {"required": [name, *others]}]})
    for name, then in schema.pop("dependentSchemas", {}).items():
        if name in required:
            _also(schema, then)
        else:
            _also(schema, {"anyOf": [_absent(name), {"allOf": [{"required": [name]}, then]}]})


def _decide(schema: Object) -> None:
    """``if`` on one property whose values can be listed becomes a choice between two branches."""
    condition = schema.get("if")
    if condition in ANYTHING or condition is False:
        branch = schema.get("then" if condition is not False else "else", True)
        _drop(schema, "if", "then", "else")
        return _also(schema, branch)
    test = _test_of(condition) if isinstance(condition, dict) and _is_object(schema) else None
    if test is None or "$ref" in schema:
        return
    name, hits, absent_hits = test
    listed = _values(schema.get("properties", {}).get(name))
    if listed is None:
        return
    hits, misses = [v for v in listed if v in hits], [v for v in listed if v not in hits]
    then, other = schema.get("then", True), schema.get("else", True)
    branches = [_branch(name, hits, then), _branch(name, misses, other)]
    if name not in schema.get("required", []):
        branches.append({"allOf": [_absent(name), then if absent_hits else other]})
    _drop(schema, "if", "then", "else")
    _also(schema, {"anyOf": [branch for branch in branches if branch is not None]})


def _test_of(condition: Object) -> tuple[str, list[Json], bool] | None:
    """Of ``{"properties": {name: const or enum}}``: the name, the values, and whether a document without it passes."""
    properties = condition.get("properties")
    if set(condition) - {"properties", "required", "type"} or not isinstance(properties, dict):
        return None
    if len(properties) != 1 or condition.get("type", "object") != "object":
        return None
    ((name, value),) = properties.items()
    values = _values(value)
    required = condition.get("required", [])
    if values is None or len(value) != 1 or required not in ([], [name]):
        return None
    return name, values, not required


def _values(schema: Json) -> list[Json] | None:
    """The values that a schema lists; None if it does not. Numbers are left out: 1 is 1.0, and True in Python."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if schema.get("type") == "boolean" and values is None:
        return [True, False]
    if isinstance(values, list) and all(isinstance(v, (str, bool)) or v is None for v in values):
        return values
    return None


def _branch(name: str, values: list[Json], rest: Json) -> Object | None:
    if not values or rest is False:
        return None
    return {"allOf": [{"required": [name], "properties": {name: {"enum": values}}}, rest]}


def _negate(schema: Object) -> None:
    """``not`` of types, of one required property, of listed values, and of alternatives of these."""
    wrong = schema.get("not")
    if not isinstance(wrong, dict) or len(wrong) != 1 or "$ref" in schema:
        return
    ((key, value),) = wrong.items()
    if key == "anyOf":
        del schema["not"]
        _also(schema, *(adapt({"not": item}) for item in value))
    elif key == "required" and len(value) == 1:
        del schema["not"]
        _also(schema, {"type": "object"} | _absent(*value))
    elif key == "type":
        types = value if isinstance(value, list) else [value]
        if "integer" not in types or "number" in types:
            del schema["not"]
            _also(schema, {"type": [t for t in TYPES if t not in types]})
    elif key in ("const", "enum"):
        wrongs, listed = _values(wrong), _values(schema)
        if wrongs is not None and listed is not None:
            _drop(schema, "not", "const")
            schema["enum"] = [v for v in listed if v not in wrongs]


def _name_properties(schema: Object) -> None:
    """``propertyNames`` with a list of names, a pattern or lengths, where nothing else says which names there may be."""
    names, more = schema.get("propertyNames"), schema.get("additionalProperties", True)
    if not isinstance(names, dict) or "patternProperties" in schema or "$ref" in schema:
        return
    known = schema.get("properties", {})
    listed = _values(names)
    if listed is not None and not set(names) - {"const", "enum", "type"}:
        allowed = {name: known.get(name, more) for name in listed if isinstance(name, str)}
        schema["properties"] = allowed | {name: False for name in known if name not in allowed}
    elif (pattern := _pattern_of(names)) is not None and (more in ANYTHING or not known):
        wrong = {name: False for name in known if not re.search(pattern, name)}
        schema["properties"] = known | wrong
        schema["patternProperties"] = {pattern: more}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def _pattern_of(names: Object) -> str | None:
    """The pattern that says the same about strings; None if there is none."""
    keys = set(names) - {"type"}
    if names.get("type", "string") != "string" or not keys:
        return None
    if keys == {"pattern"}:
        return str(names["pattern"])
    if keys <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


def _choose_one(schema: Object) -> None:
    """``oneOf`` of single required properties: with one of them, the others are absent."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list) or not branches or "anyOf" in schema:
        return
    if len(branches) == 1:
        return _also(schema, schema.pop("oneOf")[0])
    if not all(isinstance(b, dict) and set(b) == {"required"} and len(b["required"]) == 1 for b in branches):
        return
    names = [b["required"][0] for b in branches]
    if len(set(names)) == len(names) and _is_object(schema):
        del schema["oneOf"]
        schema["anyOf"] = [{"required": [n]} | _absent(*(o for o in names if o != n)) for n in names]


def _know_formats(schema: Object) -> None:
    """A format that nobody knows is an annotation (JSON Schema 2020-12 Validation, 7.2.1)."""
    name = schema.get("format")
    if not isinstance(name, str):
        return
    if name in NARROWER:
        schema["format"] = NARROWER[name]
    elif name not in OWN:
        del schema["format"]
    if name in BOUNDS:
        low, high = BOUNDS[name]
        bounds = {"minimum": low, "maximum": high}
        _limit(bounds)
        _also(schema, bounds)
    elif name in PATTERNS:
        _also(schema, PATTERNS[name])


def _limit(schema: Object) -> None:
    """Bounds that the matcher cannot compute move inwards."""
    for key, up in (
        ("minimum", True),
        ("exclusiveMinimum", True),
        ("maximum", False),
        ("exclusiveMaximum", False),
    ):
        value = schema.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if isinstance(value, int) and (near := float(value)) != value and (near < value) == up:
            value = int(math.nextafter(near, math.inf if up else -math.inf))
        schema[key] = max(value, -LARGEST) if up else min(value, LARGEST)


def _count(schema: Object) -> None:
    """Numbers of properties where these are all declared."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not properties or not isinstance(required, list):
        return
    most, least = schema.get("maxProperties"), schema.get("minProperties")
    if isinstance(most, int) and most >= len(properties) and schema.get("additionalProperties") is False:
        _drop(schema, *(() if "patternProperties" in schema else ("maxProperties",)))
    if isinstance(least, int) and least <= len(required):
        del schema["minProperties"]
    elif least == 1 and "maxProperties" not in schema:
        del schema["minProperties"]
        _also(schema, {"anyOf": [{"required": [name]} for name in properties]})


RULES: tuple[Callable[[Object], None], ...] = (
    _drop_idle,
    _close,
    _split_dependencies,
    _depend,
    _decide,
    _negate,
    _name_properties,
    _choose_one,
    _know_formats,
    _limit,
    _count,
)


# The same by logic: these see the schema as it was, too, and find what it refers to. -----------------------------------


def _negate_exactly(schema: Object, given: Object, find: Find) -> None:
    if "not" not in schema:
        return
    wrongs = opposite(given["not"], find)
    if wrongs is not None:
        del schema["not"]
        _also(schema, _one_of_these([adapt(wrong, find) for wrong in wrongs]))


def _one_of_these(schemas: list[Json]) -> Json:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas or [False]}


def _decide_exactly(schema: Object, given: Object, find: Find) -> None:
    """Either the condition and ``then``, or the opposite of the condition and ``else``."""
    if "if" not in schema:
        return
    wrongs = opposite(given["if"], find)
    if wrongs is None:
        return
    around = {key: value for key, value in given.items() if key not in ("if", "then", "else")}
    others = [adapt(wrong, find) for wrong in wrongs if not apart(wrong, around, find)]
    condition, then, other = schema.pop("if"), schema.pop("then", True), schema.pop("else", True)
    branches = [] if then is False else [{"allOf": [condition, then]}]
    branches += [{"allOf": [wrong, other]} for wrong in others if other is not False]
    _also(schema, _one_of_these(branches))


def _choose_exactly(schema: Object, given: Object, find: Find) -> None:
    """One branch and the opposites of those that it is not apart from."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list) or len(branches) > BRANCHES:
        return
    around = {key: value for key, value in given.items() if key != "oneOf"}
    found: list[Json] = []
    for i, branch in enumerate(branches):
        own = {"allOf": [given["oneOf"][i], around]}
        others = [other for j, other in enumerate(given["oneOf"]) if j != i and not apart(own, other, find)]
        ways = [_differing(own, other, find) for other in others]
        if None in ways or math.prod(map(len, filter(None, ways))) > WAYS:
            return
        if all(ways):
            needs = [_one_of_these([adapt(way, find) for way in some or ()]) for some in ways]
            found.append({"allOf": [branch, *needs]} if needs else branch)
    del schema["oneOf"]
    if "anyOf" in schema:
        _also(schema, {"anyOf": found or [False]})
    else:
        schema["anyOf"] = found or [False]


def _differing(own: Object, other: Json, find: Find) -> list[Json] | None:
    """Opposites of ``other`` for documents of ``own``; some of them, if not all can be said; None for none of these."""
    exact = opposite(other, find)
    wrongs = opposite(other, find, partly=True) if exact is None else exact
    found = [wrong for wrong in wrongs or () if not apart(own, wrong, find)]
    return None if exact is None and not found else found


def _list_sets(schema: Object, given: Object, find: Find) -> None:
    """``uniqueItems`` of few listed values: all arrays that there may be, in any order if these are not too many, else each set at
    least in the order of the list."""
    items = schema.get("items")
    if schema.get("uniqueItems") is not True or schema.get("type") != "array" or "prefixItems" in schema:
        return
    if "contains" in schema or not isinstance(items, dict):
        return
    target = find(items["$ref"]) if set(items) == {"$ref"} else items
    values = _values(target) if isinstance(target, dict) else None
    if values is None or set(target) & ASSERTIONS or len(values) > LISTED:
        return
    values = [value for value in values if not apart({"const": value}, target, find)]
    lengths = range(schema.get("minItems", 0), min(schema.get("maxItems", LISTED), len(values)) + 1)
    ordered = {size: math.comb(len(values), size) for size in lengths}
    total = sum(ordered.values())
    arrays: list[Json] = []
    for size in lengths:
        more = math.perm(len(values), size) - ordered[size]
        any_order = total + more <= SETS
        total += more if any_order else 0
        arrays += map(list, (itertools.permutations if any_order else itertools.combinations)(values, size))
    _drop(schema, "uniqueItems", "items", "minItems", "maxItems")
    schema["enum"] = arrays


EXACT: tuple[Callable[[Object, Object, Find], None], ...] = (
    _negate_exactly,
    _decide_exactly,
    _choose_exactly,
    _list_sets,
)
