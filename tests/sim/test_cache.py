"""The radix tree against a dictionary of prefixes; the free list against a set."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from sgla.cache.eviction import DEPTH
from sgla.cache.pages import PagePool
from sgla.cache.past import SPAN, Known, Past
from sgla.cache.radix import Match, NullCache, RadixCache
from sgla.cache.tree import Node, marks_from
from sgla.messages import int32

EVICTIONS = ("lru", "lfu", "fifo", "mru", "cost")


def packed(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


class NaiveCache:
    """Each cached page under (namespace, all tokens up to its end): the page, and when and how often it was
    used.

    Bookkeeping is per run of pages that entered the tree together, as the tree's is, but found by brute
    force.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.content: dict[tuple[str, tuple[int, ...]], int] = {}

    def keys(self, namespace: str, tokens: list[int]) -> list[tuple[str, tuple[int, ...]]]:
        size = self.page_size
        return [(namespace, tuple(tokens[: i + size])) for i in range(0, len(tokens) - size + 1, size)]

    def match(self, namespace: str, tokens: list[int]) -> list[int]:
        pages = []
        for key in self.keys(namespace, tokens):
            if key not in self.content:
                break
            pages.append(self.content[key])
        return pages

    def insert(self, namespace: str, tokens: list[int], pages: list[int]) -> None:
        for key, page in zip(self.keys(namespace, tokens), pages):
            self.content.setdefault(key, page)


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("marked", [False, True])
def test_tree_matches_a_dictionary(eviction: str, page_size: int, marked: bool) -> None:
    random = Random(f"{eviction}{page_size}")
    pool = PagePool(40)
    cache = RadixCache(page_size, pool, eviction)
    naive = NaiveCache(page_size)
    held: list[tuple[Node, list[int]]] = []
    for _ in range(4_000):
        namespace = random.choice(("", "a"))
        tokens = [
            random.randrange(2) for _ in range(random.randint(0, 8) * page_size + random.randrange(page_size))
        ]
        marks = {i: random.choice((b"x", b"y")) for i in range(8) if marked and random.random() < 0.15}
        seen = with_marks(tokens, marks, page_size)
        action = random.random()
        if action < 0.4:
            match = cache.match(namespace, packed(tokens), len(tokens), marks)
            assert match.pages == naive.match(namespace, seen)
            assert match.length == len(match.pages) * page_size
            assert cache.probe(namespace, packed(tokens), len(tokens), marks)[1] == match.length
            if action < 0.2 and len(held) < 4:
                cache.lock(match.node)
                held.append((match.node, match.pages))
            elif len(pool) >= len(tokens) // page_size - len(match.pages):
                add(cache, naive, pool, namespace, tokens, seen, marks, match.node, match.pages)
        elif action < 0.6 and held:
            node, pages = held.pop(random.randrange(len(held)))
            cache.unlock(node)
            if action < 0.45:
                gone = set(cache.discard(node)[0])
                locked = {page for _, others in held for page in others}
                assert gone <= set(pages) - locked
                naive.content = {key: page for key, page in naive.content.items() if page not in gone}
        else:
            evict(cache, naive, pool, random.randint(1, 6), {page for _, pages in held for page in pages})
        cache.check()
        pool.check()
        assert cache.pages == len(naive.content) == pool.total - 1 - len(pool)
    for node, _ in held:
        cache.unlock(node)
    assert cache.flush()
    assert len(pool) == pool.total - 1


def with_marks(tokens: list[int], marks: dict[int, bytes], page_size: int) -> list[int]:
    """As the dictionary sees them: other tokens."""
    seen = tokens.copy()
    for i, mark in marks.items():
        if i * page_size < len(tokens):
            seen[i * page_size] += 2 * mark[0]
    return seen


def add(
    cache: RadixCache,
    naive: NaiveCache,
    pool: PagePool,
    namespace: str,
    tokens: list[int],
    seen: list[int],
    marks: dict[int, bytes],
    node: Node,
    have: list[int],
) -> None:
    """Insert all pages of ``tokens``; those the tree has come back."""
    full = len(tokens) // cache.page_size
    fresh = pool.alloc(full - len(have)) if full > len(have) else []
    naive.insert(namespace, seen, have + fresh)
    spare = pool.alloc(len(have)) if len(pool) >= len(have) > 0 else []
    whole = packed(tokens[: full * cache.page_size])
    if spare:
        surplus, _ = cache.insert(cache.root, namespace, whole, spare + fresh, (), marks)
        assert list(surplus) == spare
        pool.free(surplus)
    elif fresh:
        below = whole[len(have) * cache.page_size * 4 :]
        rest = marks_from(marks, len(have))
        assert cache.adopt(node, namespace, below, fresh, marks=rest) is not None
        assert cache.adopt(node, namespace, below, fresh, marks=rest) is None


def evict(cache: RadixCache, naive: NaiveCache, pool: PagePool, n: int, locked: set[int]) -> None:
    """Only unlocked pages go, from the end of a prefix; exactly as many as asked if there are as many."""
    free, evictable = len(pool), cache.evictable
    assert cache.evict(n) == min(n, evictable) == len(pool) - free
    gone = {key for key, page in naive.content.items() if not pool._out[page]}
    assert all(naive.content.pop(key) not in locked for key in gone)
    for namespace, tokens in naive.content:
        assert len(tokens) == cache.page_size or (namespace, tokens[: -cache.page_size]) in naive.content


@pytest.mark.parametrize(
    ("eviction", "survivors"),
    [
        ("lru", {"b", "d"}),
        ("cost", {"b", "d"}),
        ("mru", {"a", "c"}),
        ("fifo", {"c", "d"}),
        ("lfu", {"a", "d"}),
    ],
)
def test_eviction_order(eviction: str, survivors: set[str]) -> None:
    """Four entries, in order of age a b c d; a is used twice, then b and d once: two of them go."""
    pool = PagePool(9)
    cache = RadixCache(1, pool, eviction)
    entries = {name: packed([ord(name)]) for name in "abcd"}
    for key in entries.values():
        cache.adopt(cache.root, "", key, pool.alloc(1))
    for name in "aabd":
        cache.match("", entries[name], 1)
    assert cache.evict(2) == 2
    assert {name for name, key in entries.items() if cache.probe("", key, 1)[1]} == survivors


@pytest.mark.parametrize(("eviction", "stays"), [("lru", 1), ("cost", 4)])
def test_what_is_deep_and_takes_long_to_compute_stays_longer(eviction: str, stays: int) -> None:
    """A text three times ``DEPTH`` long, of which the end costs four times as much as what comes after it."""
    pool = PagePool(3 * DEPTH + 101)
    cache = RadixCache(1, pool, eviction)
    text = packed([1] * 3 * DEPTH)
    cache.adopt(cache.root, "", text, pool.alloc(3 * DEPTH))
    generations = 0
    for i in range(2, 1000):
        if not len(pool):
            cache.evict(1)
        cache.adopt(cache.root, "", packed([i]), pool.alloc(1))
        if cache.probe("", text, 3 * DEPTH)[1] < 3 * DEPTH:
            break
        generations = (i - 1) // 100
    assert generations == stays
    cache.check()


def test_a_run_is_evicted_from_its_end_and_only_as_far_as_needed() -> None:
    pool = PagePool(11)
    cache = RadixCache(2, pool)
    tokens = list(range(20))
    pages = pool.alloc(10)
    cache.adopt(cache.root, "", packed(tokens), pages)
    assert cache.evict(3) == 3
    assert cache.match("", packed(tokens), 20).pages == pages[:7]


def test_a_lock_survives_a_split_and_keeps_the_path() -> None:
    pool = PagePool(11)
    cache = RadixCache(1, pool)
    node = cache.adopt(cache.root, "", packed([1, 2, 3, 4]), pool.alloc(4))
    assert node is not None
    cache.lock(node)
    match = cache.match("", packed([1, 2, 9]), 3)
    assert match.length == 2
    cache.check()
    assert cache.evict(10) == 0
    cache.unlock(node)
    assert cache.evict(10) == 4


def test_the_heap_stays_small_however_often_leaves_are_used() -> None:
    pool = PagePool(11)
    cache = RadixCache(1, pool)
    for token in range(10):
        cache.adopt(cache.root, "", packed([token]), pool.alloc(1))
    for i in range(5000):
        cache.match("", packed([i % 10]), 1)
    assert len(cache._leaves) <= 4 * 10 + 65


def test_no_cache_finds_and_keeps_nothing() -> None:
    pool = PagePool(5)
    cache = NullCache(1, pool)
    pages = pool.alloc(2)
    assert cache.insert(cache.root, "", packed([1, 2]), pages) == (pages, [])
    assert cache.adopt(cache.root, "", packed([1, 2]), pages) is None
    assert cache.match("", packed([1, 2]), 2) == Match(cache.root, [], 0, [])
    assert cache.find("", packed([1, 2]), 2) is None
    assert cache.probe("", packed([1, 2]), 2) == (cache.root, 0)


def test_pool_hands_out_each_page_once() -> None:
    random = Random(5)
    pool = PagePool(64)
    out: set[int] = set()
    for _ in range(3000):
        n = random.randint(1, 8)
        if random.random() < 0.5 and n <= len(pool):
            pages = pool.alloc(n)
            assert out.isdisjoint(pages)
            assert 0 not in pages
            out.update(pages)
        elif out:
            back = random.sample(sorted(out), min(n, len(out)))
            pool.free(back)
            out.difference_update(back)
        pool.check()
        assert len(pool) == 63 - len(out)


def test_double_free_is_caught() -> None:
    pool = PagePool(4)
    page = pool.alloc(1)
    pool.free(page)
    with pytest.raises(AssertionError, match="twice"):
        pool.free(page)
    with pytest.raises(AssertionError):
        pool.alloc(4)


def test_who_computes_the_last_token_of_a_span_brings_it_to_the_past() -> None:
    """Texts grow by parts of a span, as chats do: each begins with all that the one before had."""
    past, text = Past(), int32(range(3 * SPAN + 10))
    had = 0
    for length in (100, SPAN - 1, SPAN, SPAN + 50, 3 * SPAN + 10):
        past.add("", text[: 4 * length], had)
        had = length
        assert past.known("", text, 0) == Known(length // SPAN * SPAN)
    assert past.known("", text, 2 * SPAN) == Known(3 * SPAN)
    assert past.known("", text, 3 * SPAN) == Known()


def test_the_past_knows_other_namespaces() -> None:
    past, text = Past(), int32(range(3 * SPAN))
    past.add("a", text[: 4 * SPAN], 0)
    past.add("\1one\1a", text, 0)
    assert past.known("a", text, 0) == Known(SPAN, 3 * SPAN, "adapter")
    assert past.known("b", text, 0) == Known(0, 3 * SPAN, "adapter")
    assert past.known("\1one\1b", text, 0) == Known(0, 3 * SPAN, "salt")
    assert past.known("\0021\2\1one\1a", text, 0) == Known(0, 3 * SPAN, "weights")
    assert past.known("\1one\1a", text, 0) == Known(3 * SPAN)
    for salt in "vwxyz":
        past.add(salt, text, 0)
    assert past.known("v", text, 0) == Known(0, 3 * SPAN, "salt"), "of each span the latest are remembered"


def test_pages_follow_each_other_where_many_are_taken() -> None:
    """Few come in the order in which they were given back, without a look at all that are free."""
    pool = PagePool(101)
    pages = pool.alloc(100)
    for page in Random(5).sample(pages, 100):
        pool.free([page])
    before = pool.alloc(3)
    assert before != sorted(before)
    assert pool.alloc(30) == sorted(set(range(1, 101)) - set(before))[:30]
    pool.check()
