"""How many public JSON Schemas compile, what the others are refused for, and whether anything invalid is
accepted.

    python bench/schemas.py FOLDER ... [--limit 1000] [--walks 4] [--jobs 2] [--open] [--show 20]

A folder holds JSON files: schemas; MaskBench's, with ``schema`` and ``tests`` of ``valid`` and ``data``; or
lists of such groups, as JSON-Schema-Test-Suite has them. Each schema is compiled in a process of its own
within the server's limits. Outputs are then made by random walks through the grammar and checked by
jsonschema_rs, and so is every test's text that the grammar accepts. Schemas that refer to other files are
left out. Prints one JSON line; the exit code is 1 if something invalid is accepted, or a schema fails
otherwise than by being refused.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema_rs
import lines
import numpy as np

from sgla.grammar.llg import load_tokenizer, make_matcher
from sgla.grammar.protocol import Vocabulary
from sgla.grammar.sandbox import MEMORY, compile_grammar
from sgla.messages import MAX_GRAMMAR, Grammar

SECONDS = 6  # of CPU time to start, and to compile one schema as in the server
WALKS = 60  # for all the rest
LENGTH = 600  # tokens of a walk
# Tokens of one byte, so that a text has one form: what is allowed does not depend on the vocabulary.
VOCABULARY = Vocabulary(tokens=[bytes([i]) for i in range(256)] + [b"<end>"], special=[256], ends=[256])
Test = tuple[bool, Any]


def cases(folder: Path) -> Iterator[tuple[str, Any, list[Test]]]:
    """Name, schema and tests."""
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        groups = content if isinstance(content, list) else [content]
        for i, group in enumerate(groups):
            if not isinstance(group, dict):
                continue
            tests = group.get("tests")
            if "schema" in group and isinstance(tests, list):
                found = [(t["valid"], t["data"]) for t in tests if isinstance(t, dict) and "data" in t]
                yield f"{path}#{i}", group["schema"], found
            elif not isinstance(content, list) and looks_like_a_schema(content):
                yield str(path), content, []


def looks_like_a_schema(content: dict[str, Any]) -> bool:
    return "json-schema.org" in str(content.get("$schema")) or content.get("type") == "object"


@functools.cache
def tokenizer() -> Any:
    """Loaded before the processes fork."""
    return load_tokenizer(VOCABULARY)


def judge(schema: Any, tests: list[Test], walks: int, additional: bool) -> dict[str, Any]:
    """What becomes of one schema. Runs in a process of its own."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, WALKS))
    text = json.dumps(schema)
    answer = compile_grammar(tokenizer(), {}, Grammar(kind="json_schema", text=text, additional=additional))
    if answer.error is not None:
        return {"refused": answer.error}
    resource.setrlimit(resource.RLIMIT_CPU, (WALKS, WALKS))
    result: dict[str, Any] = {"invalid": [], "finished": 0, "stuck": 0, "accepted": 0, "rejected": 0}
    try:
        validator = jsonschema_rs.validator_for(schema, pattern_options=jsonschema_rs.RegexOptions())
    except ValueError:  # a schema or a pattern that it does not take: the tests say what is valid
        walks = 0
    for valid, data in tests:
        accepted = takes(make_matcher(tokenizer(), answer.source), json.dumps(data, ensure_ascii=False))
        if accepted and not valid:
            result["invalid"].append(data)
        if valid:
            result["accepted" if accepted else "rejected"] += 1
    for seed in range(walks):
        output, ended = walk(make_matcher(tokenizer(), answer.source), random.Random(seed))
        result["stuck"] += ended is None
        if not ended:
            continue
        result["finished"] += 1
        with suppress(Beyond):  # the range of floating-point numbers
            if not validator.is_valid(json.loads(output, parse_float=finite)):
                result["invalid"].append(output)
    return result


class Beyond(ValueError):
    pass


def finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise Beyond
    return number


def takes(matcher: Any, text: str) -> bool:
    tokens = list(text.encode())
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return bool(matcher.is_accepting())


def walk(matcher: Any, rng: random.Random) -> tuple[str, bool | None]:
    """A random output that ends as soon as it may, once it is long. Whether it ended; None: no token was
    left."""
    output = bytearray()
    for _ in range(LENGTH):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        closing = [t for t in allowed if t == 256 or (len(output) > LENGTH / 4 and chr(t) in '"]}')]
        if not len(allowed) or matcher.is_error():
            return output.decode("utf-8", "replace"), None
        token = int(rng.choice(closing or list(allowed)))
        if token == 256:
            return output.decode("utf-8", "replace"), True
        output.append(token)
        matcher.consume_token(token)
    return output.decode("utf-8", "replace"), False


def chosen(args: argparse.Namespace, counts: Counter[str]) -> Iterator[tuple[Any, ...]]:
    """The work for each schema, behind its name."""
    for folder in args.folders:
        found = list(cases(folder))
        for name, schema, tests in found[:: max(1, -(-len(found) // args.limit))]:
            if len(json.dumps(schema)) > MAX_GRAMMAR:
                counts["too long"] += 1
            else:
                yield name, schema, tests, args.walks, args.open


def in_a_process(work: tuple[Any, ...]) -> tuple[str, dict[str, Any]]:
    name, *rest = work
    ours, theirs = multiprocessing.Pipe(False)
    child = multiprocessing.Process(target=send, args=(theirs, *rest))
    child.start()
    theirs.close()
    try:
        return name, ours.recv()
    except EOFError:
        return name, {"refused": "the grammar is too complex: its process died"}
    finally:
        child.join()


def send(pipe: Any, *work: Any) -> None:
    try:
        pipe.send(judge(*work))
    except Exception as error:
        pipe.send({"failed": repr(error)[:200]})


def reason(error: str) -> str:
    """The keyword that a refusal names, or how it begins."""
    found = re.search(r"keyword '([^']+)'", error)
    return found[1] if found else error.split(":")[0][:60]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=10**9, help="schemas of each folder, spread evenly")
    parser.add_argument("--walks", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="schemas at a time")
    parser.add_argument("--open", action="store_true", help="let objects have undeclared properties")
    parser.add_argument("--show", type=int, default=0, help="refusals to print")
    args = parser.parse_args()
    tokenizer()
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    with ProcessPoolExecutor(args.jobs) as pool:
        found = pool.map(in_a_process, chosen(args, counts), chunksize=4)
        for name, result in found:
            if "is not present in a registry" in result.get("refused", ""):
                counts["refer elsewhere"] += 1
                continue
            counts["schemas"] += 1
            if "refused" in result:
                refused[reason(result["refused"])] += 1
                if sum(refused.values()) <= args.show:
                    print(name, result["refused"])
                continue
            if "failed" in result:
                counts["failed"] += 1
                print(name, result["failed"])
                continue
            counts["compiled"] += 1
            counts.update({key: result[key] for key in ("finished", "stuck", "accepted", "rejected")})
            counts["invalid"] += len(result["invalid"])
            for output in result["invalid"]:
                print("INVALID", name, str(output)[:300])
    share = round(100 * counts["compiled"] / max(1, counts["schemas"]), 2)
    print(
        lines.line(
            {"bench": "schemas", "compiled_percent": share, **counts, "refused": dict(refused.most_common())}
        )
    )
    return int(counts["invalid"] + counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
