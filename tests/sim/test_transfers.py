"""Copies of pages on the host: what is saved, what comes back, who is held meanwhile, and what a failure
leaves."""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from simulation import Simulation, make_limits, make_submit

from sgla.messages import CacheGroup, RowSampling, StepPlan, Tier
from sgla.sched.budget import Budget
from sgla.sched.prefill import Prefill
from sgla.sched.request import Request, State

LONG = [(7 * i) % 50 for i in range(40)]
OTHER = [(3 * i + 1) % 50 for i in range(40)]


def simulate(**changes: Any) -> Simulation:
    """The device has pages for one of the long prompts."""
    tiers = [Tier("host", [changes.pop("host", 40)])]
    return Simulation(make_limits(**{"pages": 14, "tiers": tiers} | changes))


def run(simulation: Simulation, rid: str, tokens: list[int]) -> int:
    """How many tokens were served from the tree."""
    simulation.offer(make_submit(rid, tokens, 4))
    simulation.run()
    return simulation.deltas[rid][0].cached_tokens


def copies(plans: list[StepPlan], target: str) -> list[int]:
    """Pages of each copy."""
    return [len(copy.targets[0]) // 4 for plan in plans for copy in plan.copies if copy.target == target]


def held(simulation: Simulation, rid: str) -> bool:
    return simulation.core._queues.open[rid].state is State.HELD


def evicted() -> Simulation:
    """A long prompt has been computed, saved and evicted but for its first two pages."""
    simulation = simulate()
    run(simulation, "first", LONG)
    run(simulation, "other", OTHER)
    simulation.plans.clear()
    return simulation


def test_what_was_computed_is_saved_once() -> None:
    simulation = simulate()
    run(simulation, "first", LONG)
    assert copies(simulation.plans, "host") == [10]
    run(simulation, "again", [*LONG, 1, 2, 3, 4, 5])
    assert copies(simulation.plans, "host") == [10, 2]
    simulation.verify()


def test_units_of_a_text_follow_each_other() -> None:
    """On the device and beside it, also in the places of others, so that they are copied at once."""
    simulation = simulate(pages=13, host=20)
    for i in range(6):
        run(simulation, f"r{i}", [(i + 3 + 7 * j) % 50 for j in range(40)])
        simulation.evict()
    moved = [copy for plan in simulation.plans for copy in plan.copies]
    assert len(moved) == 6
    for copy in moved:
        for ends in (copy.sources, copy.targets):
            units = array("i", ends[0]).tolist()
            assert units == list(range(units[0], units[0] + 10))


def test_an_evicted_prefix_comes_back() -> None:
    simulation = evicted()
    assert run(simulation, "again", [*LONG, 1, 2]) == 40
    assert copies(simulation.plans, "device") == [8]
    simulation.verify()


def test_a_plan_may_have_no_rows() -> None:
    simulation = evicted()
    simulation.offer(make_submit("again", LONG))
    simulation.submit_plans()
    [plan] = simulation.plans
    assert (plan.slots, len(plan.copies)) == (b"", 1)
    assert held(simulation, "again")
    simulation.run()
    simulation.verify()


def test_others_run_while_a_request_is_held_and_those_of_the_same_prefix_wait_for_it() -> None:
    simulation = evicted()
    for rid, tokens in (("again", LONG), ("same", [*LONG[:24], 1]), ("else", [1, 2, 3])):
        simulation.offer(make_submit(rid, tokens))
    while simulation.finish("else") is None:
        simulation.step()
    assert (held(simulation, "again"), held(simulation, "same")) == (True, True)
    simulation.run()
    assert copies(simulation.plans, "device") == [7]  # the last token of a prompt is computed in any case
    assert [simulation.deltas[rid][0].cached_tokens for rid in ("again", "same")] == [36, 24]
    simulation.verify()


def test_the_host_tells_media_apart() -> None:
    simulation = simulate()
    for rid, digest in (("cat", b"cat"), ("dog", b"dog")):
        simulation.offer(make_submit(rid, LONG, 4, media=[(9, digest)]))
        simulation.run()
    assert [simulation.deltas[rid][0].cached_tokens for rid in ("cat", "dog")] == [0, 8]
    simulation.offer(make_submit("again", LONG, 4, media=[(9, b"cat")]))
    simulation.run()
    assert simulation.deltas["again"][0].cached_tokens == 36
    simulation.verify()


def test_a_failed_copy_leaves_nothing_and_is_not_tried_again() -> None:
    simulation = evicted()
    simulation.offer(make_submit("again", [*LONG, 1, 2]))
    simulation.step()
    simulation.core.moved(simulation.model.move(simulation.copies.pop(), ok=False))
    simulation.core.check()
    assert not held(simulation, "again")
    simulation.run()
    assert simulation.deltas["again"][0].cached_tokens == 8
    assert copies(simulation.plans, "device") == [8]
    simulation.verify()


def test_what_a_retracted_request_leaves_is_not_copied() -> None:
    simulation = simulate(pages=18, depth=1, slots=4)
    simulation.offer(make_submit("first", LONG[:8], 12))
    simulation.run()
    simulation.evict()
    simulation.offer(make_submit("yields", LONG[:8], 12, yields=True))
    while len(simulation.tokens("yields")) < 5:
        simulation.step()
    simulation.offer(make_submit("reader", OTHER, 2))
    run(simulation, "high", [*LONG[:8], *simulation.tokens("first")])
    assert simulation.core.stats().preemptions > 0
    assert simulation.deltas["high"][0].cached_tokens >= 12
    simulation.verify()


def test_what_only_copies_can_free_waits_for_no_clock() -> None:
    """Both requests give their pages up in one plan, which has no rows then; what they leave is locked until
    its copies have begun."""
    simulation = simulate(pages=12, slots=2, depth=1, context_len=48, host=60)
    for rid, tokens in (("longer", LONG[:26]), ("shorter", OTHER[:8])):
        simulation.offer(make_submit(rid, tokens, 8))
    simulation.run()
    assert simulation.core.stats().preemptions > 0
    simulation.verify()


def test_a_copy_outlives_the_request_it_was_made_for() -> None:
    simulation = evicted()
    simulation.offer(make_submit("again", LONG))
    simulation.step()
    simulation.cancel("again")
    simulation.core.check()
    assert not simulation.core.idle
    simulation.run()
    simulation.plans.clear()
    assert run(simulation, "later", LONG) == 36
    assert not copies(simulation.plans, "device")
    simulation.verify()


def test_a_text_that_had_no_numbers_is_forgotten_on_the_host() -> None:
    simulation = evicted()
    simulation.offer(make_submit("broken", [*LONG, 1, 2]))
    while simulation.finish("broken") is None:
        row = simulation.core._queues.flights and simulation.core._queues.flights[0].rows
        simulation.step(broken=0.0 if row else None)
    simulation.run()
    assert run(simulation, "next", LONG) == 0
    simulation.verify()


@pytest.mark.parametrize("pages", [1, 3])
def test_the_host_keeps_what_was_used_last(pages: int) -> None:
    simulation = simulate(host=pages)
    run(simulation, "first", LONG)
    run(simulation, "other", OTHER)
    run(simulation, "third", LONG[::-1])
    assert run(simulation, "back", LONG[::-1]) == 36
    assert run(simulation, "last", OTHER) <= 4 * pages
    simulation.verify()


def grouped(*others: CacheGroup, **changes: Any) -> Simulation:
    """A device with room for one long prompt, with cache groups beside the first one, and a disk."""
    tiers = [Tier("disk", [40] * (1 + len(others)), lasting=True)]
    return Simulation(make_limits(**{"pages": 14, "windows": others, "tiers": tiers} | changes))


@pytest.mark.parametrize("window", [1, 6, 9])
def test_pages_of_windows_come_back(window: int) -> None:
    simulation = grouped(CacheGroup(8, window))
    run(simulation, "first", LONG)
    simulation.evict()
    simulation.plans.clear()
    assert run(simulation, "again", [*LONG, 1, 2]) == 40
    [copy] = [copy for plan in simulation.plans for copy in plan.copies if copy.target == "device"]
    assert [len(column) // 4 for column in copy.targets] == [10, (window + 2) // 4]
    simulation.verify()


def test_a_tier_has_windows_of_the_ends_of_many_texts() -> None:
    """What else is left of windows takes nobody's place, and is the first to go."""
    simulation = Simulation(
        make_limits(pages=14, windows=[CacheGroup(14, 6)], tiers=[Tier("host", [100, 14])])
    )
    texts = [[(i + 3 + 7 * j) % 50 for j in range(40)] for i in range(5)]
    for i, text in enumerate(texts):
        run(simulation, f"first{i}", text)
    assert [run(simulation, f"again{i}", [*text, 1, 2]) for i, text in enumerate(texts)] == [40] * 5
    simulation.verify()


def test_a_window_that_alone_was_lost_comes_back_alone() -> None:
    simulation = grouped(CacheGroup(5, 6), pages=40, context_len=60)
    run(simulation, "first", LONG)
    run(simulation, "other", OTHER)
    simulation.plans.clear()
    assert run(simulation, "again", [*LONG, 1, 2]) == 40
    [copy] = [copy for plan in simulation.plans for copy in plan.copies if copy.target == "device"]
    assert [len(column) // 4 for column in copy.targets] == [0, 2]
    simulation.verify()


def test_checkpoints_of_states_come_back() -> None:
    simulation = grouped(CacheGroup(12, every=16))
    run(simulation, "first", [*LONG, 1, 2])
    simulation.evict()
    simulation.plans.clear()
    assert run(simulation, "again", [*LONG, 3, 4]) == 40
    assert run(simulation, "half", [*LONG[:38], 3, 4]) == 32
    copied = [copy.targets for plan in simulation.plans for copy in plan.copies if copy.target == "device"]
    assert [[len(column) // 4 for column in columns] for columns in copied] == [[10, 1], [0, 1]]
    simulation.verify()


def test_the_nearest_of_tiers_that_have_as_much_is_read() -> None:
    simulation = Simulation(
        make_limits(pages=14, tiers=[Tier("host", [5]), Tier("disk", [40], lasting=True)])
    )
    run(simulation, "first", LONG[:20])
    run(simulation, "second", OTHER)
    simulation.evict()
    for rid, tokens, source in (("near", OTHER[:18], "host"), ("far", LONG[:20], "disk")):
        simulation.plans.clear()
        assert run(simulation, rid, tokens) == 16
        copied = [copy.source for plan in simulation.plans for copy in plan.copies if copy.target == "device"]
        assert copied == [source]
    simulation.verify()


def test_a_disk_is_found_again_and_what_was_flushed_is_not() -> None:
    first = grouped()
    run(first, "first", LONG)
    run(first, "other", OTHER)
    second = Simulation(first.limits, before=first)
    assert (run(second, "again", LONG), run(second, "else", OTHER)) == (36, 36)
    second.core.flush_cache(tiers=False)
    assert run(second, "kept", LONG) == 36
    second.core.flush_cache()
    run(second, "short", [1])
    third = Simulation(first.limits, before=second)
    assert run(third, "again", LONG) == 0
    for simulation in (first, second, third):
        simulation.verify_states()
        simulation.assert_released()


def shared() -> list[Simulation]:
    """Two servers with a store in common."""
    limits = make_limits(pages=14, tiers=[Tier("store", [0], shared=True, least=3)])
    first = Simulation(limits)
    return [first, Simulation(limits, before=first)]


def test_servers_share_a_store() -> None:
    first, second = shared()
    assert (run(first, "first", LONG[:30]), run(second, "again", LONG)) == (0, 28)
    assert run(first, "more", [*LONG, 1]) == 40
    asked = [copy for plan in first.plans for copy in plan.copies if not copy.target]
    assert [len(copy.keys[0]) // 16 for copy in asked] == [7, 3]
    first.verify_states()
    second.core.check()


def test_a_store_is_not_asked_for_little_nor_for_what_is_there() -> None:
    simulation, _ = shared()
    run(simulation, "first", LONG)
    simulation.plans.clear()
    run(simulation, "little", [*LONG[:28], 1, 2, 3, 4, 5, 6, 7, 8])
    assert not [copy for plan in simulation.plans for copy in plan.copies if copy.source == "store"]
    simulation.verify()


def test_a_store_that_does_not_answer_costs_nobody_his_text() -> None:
    simulation, _ = shared()
    simulation.offer(make_submit("r", LONG))
    simulation.step()
    assert held(simulation, "r")
    simulation.core.moved(simulation.model.move(simulation.copies.pop(), ok=False))
    simulation.run()
    simulation.verify()


def read_elsewhere(*others: CacheGroup, **changes: Any) -> Simulation:
    """A decode server whose prefill server brings all that it is asked for."""
    tiers = [Tier("prefill", [0] * (1 + len(others)), shared=True, least=1, computes=True)]
    return Simulation(make_limits(windows=others, tiers=tiers, **changes))


@pytest.mark.parametrize("others", [(), (CacheGroup(9, 6),)])
def test_of_a_prompt_that_another_server_has_read_one_token_is_computed(
    others: tuple[CacheGroup, ...],
) -> None:
    simulation = read_elsewhere(*others)
    for count in (36, 37, 38, 39):
        tokens = LONG[count:] + LONG[:count]  # of none the beginning is there
        simulation.offer(make_submit(f"r{count}", tokens[:count], 4))
        simulation.run()
    assert simulation.core.stats().prefilled_tokens == 4
    assert {column for plan in simulation.plans for column in plan.q_lens[::4]} == {1}
    simulation.verify_states()
    simulation.assert_released()


@pytest.mark.parametrize("others", [(), (CacheGroup(9, 6),)])
def test_who_has_no_room_in_a_step_keeps_the_page_in_which_its_prompt_ends(
    others: tuple[CacheGroup, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation, asked, chunk = read_elsewhere(*others), list[int](), Prefill.chunk

    def full(self: Prefill, request: Request, budget: Budget, others: bool) -> int:
        if request.rid == "r":
            asked.append(request.planned)
        return 0 if 0 < len(asked) < 3 else chunk(self, request, budget, others)

    monkeypatch.setattr(Prefill, "chunk", full)
    simulation.offer(make_submit("stream", OTHER[:3], 30))
    simulation.offer(make_submit("r", LONG[:11], 4))
    while not asked:
        simulation.step()
        simulation.end_a_copy(Random(0))
    simulation.run()
    assert asked == [10, 10, 10]
    assert simulation.core.stats().prefilled_tokens == 3 + 1
    simulation.verify()
    simulation.assert_released()


def test_where_a_prompt_ends_within_a_page_is_nobody_elses() -> None:
    """Who leaves before its turn gives the page back; who runs takes it where there is no other."""
    simulation = read_elsewhere(slots=2)
    memory = simulation.core._memory
    for rid, count, most in (("long", 4, 52), ("gone", 10, 2), ("left", 11, 2)):
        simulation.offer(make_submit(rid, [count] * count, most))
    while len(memory.rests) < 2:
        simulation.step()
        while simulation.copies:
            simulation.end_a_copy(Random(0))
    simulation.cancel("gone")
    simulation.core.check()
    assert len(memory.rests) == 1
    room, [more, *_] = len(memory.pool) + memory.cache.evictable, memory.available
    assert more == room + 1
    assert memory.grow(simulation.core.open["long"], more)
    simulation.core.check()
    simulation.cancel("long")
    simulation.run()
    simulation.verify()


@pytest.mark.parametrize(("media", "saved"), [([], 3), ([(9, b"cat")], 2)])
def test_a_page_that_ends_with_a_picture_is_not_handed_over(
    media: list[tuple[int, bytes]], saved: int
) -> None:
    """Its key would be that of the text alone."""
    simulation = Simulation(make_limits(tiers=[Tier("host", [40], early=True)]))
    simulation.offer(make_submit("r", LONG[:11], 1, media=media))
    simulation.run()
    assert sum(copies(simulation.plans, "host")) == saved
    simulation.verify()


def test_saving_does_not_keep_the_device_from_work() -> None:
    """Copies that do not end hold what they copy, and nobody waits for it."""
    simulation = simulate(pages=40, host=200)
    for i in range(8):
        simulation.offer(make_submit(f"r{i}", [(i * x + i) % 50 for x in range(30)], 4))
    while any(simulation.finish(f"r{i}") is None for i in range(8)):
        simulation.submit_plans()
        plan = simulation.flights.popleft()
        result = simulation.model.execute(plan)
        simulation.copies += [copy.transfer for copy in plan.copies]
        simulation.take(simulation.core.retire(result, simulation.now))
    assert sum(copies(simulation.plans, "host")) < 20
    simulation.run()
    simulation.verify()


def play(random: Random) -> list[Simulation]:
    """Servers, one after the other, whose requests have few prefixes, of which the device loses some."""
    beside = random.choice(
        ((), (CacheGroup(9, 5),), (CacheGroup(7, every=8),), (CacheGroup(9, 6), CacheGroup(5, every=4)))
    )
    limits = make_limits(
        pages=random.choice((10, 14, 20)),
        windows=beside,
        tiers=[
            Tier(
                "host",
                [random.choice((5, 20)) for _ in range(1 + len(beside))],
                early=random.choice((False, True)),
            ),
            Tier("disk", [random.choice((5, 20, 60)) for _ in range(1 + len(beside))], lasting=True),
            Tier("store", [0] * (1 + len(beside)), shared=True, least=random.choice((1, 3))),
            Tier("prefill", [0] * (1 + len(beside)), shared=True, least=1, computes=True),
        ][random.choice((0, 1, 2, 3)) :],
        slots=random.choice((1, 2, 4)),
        depth=random.randint(1, 3),
        drafts=random.choice((0, 3)),
        policy=random.choice(("fcfs", "lpm", "dfs-weight", "lof")),
        write_policy=random.choice(("write_through", "write_through_selective", "write_back")),
    )
    stems = [[random.randrange(3) for _ in range(24)] for _ in range(3)]
    servers = list[Simulation]()
    for _ in range(2):
        servers.append(Simulation(limits, before=servers[-1] if servers else None))
        serve(servers[-1], random, stems)
    return servers


def serve(simulation: Simulation, random: Random, stems: list[list[int]]) -> None:
    pending = 10
    while pending or not simulation.core.idle:
        if pending and random.random() < 0.3:
            pending -= 1
            tokens = random.choice(stems)[: random.randint(4, 24)] + [random.randrange(3) for _ in range(3)]
            simulation.offer(make_submit(f"r{pending}", tokens, random.choice((0, 1, 9))))
        if random.random() < 0.3:
            simulation.end_a_copy(random, failures=0.3)
        if random.random() < 0.2:
            simulation.evict()
        if random.random() < 0.01:
            simulation.core.flush_cache()
        if random.random() < 0.02 and simulation.submits:
            simulation.cancel(random.choice(list(simulation.submits)))
        simulation.paused = random.random() < 0.1
        simulation.step(broken=random.random() if random.random() < 0.01 else None)


def test_text_is_the_same_whatever_becomes_of_copies() -> None:
    loaded: Counter[tuple[int, str, int]] = Counter()
    for seed in range(40):
        servers = play(Random(seed))
        for i, simulation in enumerate(servers):
            for rid in simulation.submits:
                tokens, _ = simulation.alone(rid)
                got = simulation.tokens(rid)
                assert got == (tokens[: len(got)] if rid in simulation.cut else tokens), (seed, rid)
            simulation.assert_released()
            for plan in simulation.plans:
                for copy in plan.copies:
                    if copy.target == "device":
                        loaded[i, copy.source, len(copy.sources)] += 1
    for part in (0, 1, 2):
        counts = Counter[object]()
        for key, count in loaded.items():
            counts[key[part]] += count
        assert len(counts) == (2, 4, 3)[part]
        assert min(counts.values()) > 5, "too little was loaded to tell"


def test_what_is_found_again_is_saved_selectively() -> None:
    tiers = [Tier("disk", [300], lasting=True)]
    simulation = Simulation(
        make_limits(pages=81, context_len=700, tiers=tiers, write_policy="write_through_selective")
    )
    text = [(7 * i + i // 50) % 50 for i in range(101)]
    run(simulation, "new", text)
    assert simulation.core.stats().tiers[0].saved == 0
    run(simulation, "again", [*text[:60], *text[:40]])
    assert simulation.core.stats().tiers[0].saved == 60 // 4
    simulation.evict()
    run(simulation, "disk", text)
    assert simulation.core.stats().hits == {"device": 60, "disk": 60}
    simulation.verify()


def test_what_is_about_to_go_is_saved_with_write_back() -> None:
    """With its images, and nothing while there is room."""
    simulation = simulate(pages=42, host=80, write_policy="write_back")
    texts = [[(a * i + a) % 50 for i in range(40)] for a in (3, 7, 11, 13, 17, 19)]
    for i, text in enumerate(texts[:2]):
        simulation.offer(make_submit(f"r{i}", text, 4, media=[(9, b"cat")]))
        simulation.run()
    assert not copies(simulation.plans, "host")
    for i, text in enumerate(texts[2:], 2):
        run(simulation, f"r{i}", text)
    assert sum(copies(simulation.plans, "host")) < 5 * 10
    simulation.evict()
    simulation.offer(make_submit("again", texts[0], 4, media=[(9, b"cat")]))
    simulation.run()
    assert simulation.deltas["again"][0].cached_tokens == 36
    assert simulation.core.stats().hits["host"] == 36
    simulation.verify()


def test_other_groups_are_written_through_with_write_back() -> None:
    """They are few, and lost one by one."""
    simulation = grouped(CacheGroup(9, 6), CacheGroup(12, every=16), pages=42, write_policy="write_back")
    run(simulation, "first", [*LONG, 1, 2])
    [copy] = [copy for plan in simulation.plans for copy in plan.copies]
    assert [len(column) // 4 for column in copy.targets] == [0, 7, 4]
    for i, a in enumerate((3, 11, 13, 17)):
        run(simulation, f"r{i}", [(a * j + a) % 50 for j in range(40)])
    simulation.evict()
    assert run(simulation, "again", [*LONG, 3, 4]) == 40
    simulation.verify()


def waiting(**changes: Any) -> tuple[Simulation, list[list[int]]]:
    """One request runs for long, and texts that a disk has are wanted by others behind it."""
    tiers = [Tier("disk", [100], lasting=True)]
    simulation = Simulation(make_limits(**{"pages": 60, "slots": 1, "tiers": tiers} | changes))
    texts = [[(a * i + a) % 50 for i in range(40)] for a in (3, 7, 11)]
    for i, text in enumerate(texts):
        run(simulation, f"first{i}", text)
    simulation.evict()
    simulation.plans.clear()
    simulation.offer(make_submit("runs", [1, 2, 3], 60))
    simulation.step()
    return simulation, texts


def test_what_a_waiting_request_needs_comes_before_its_turn() -> None:
    """A fourth of the pages at most, beside that of one request; each is brought once."""
    simulation, texts = waiting(pages=80)
    for i, text in enumerate(texts):
        simulation.offer(make_submit(f"waits{i}", text))
    while simulation.finish("runs") is None:
        simulation.step()
        simulation.end_a_copy(Random(0))
    assert copies(simulation.plans, "device") == [9, 9]
    simulation.run()
    assert copies(simulation.plans, "device") == [9, 9, 9]
    assert [simulation.deltas[f"waits{i}"][0].cached_tokens for i in range(3)] == [36] * 3
    assert simulation.core.stats().hits["disk"] == 3 * 36
    simulation.verify()


def test_what_was_brought_and_lost_before_its_turn_is_brought_again() -> None:
    simulation, [text, *_] = waiting()
    simulation.offer(make_submit("waits", text))
    for _ in range(4):
        simulation.step()
        simulation.end_a_copy(Random(0))
    assert copies(simulation.plans, "device") == [9]
    simulation.evict()
    simulation.run()
    assert copies(simulation.plans, "device") == [9, 9]
    assert simulation.deltas["waits"][0].cached_tokens == 36
    simulation.verify()


@pytest.mark.parametrize("ends", [False, True])
def test_what_a_request_that_goes_has_waited_for_is_given_up(ends: bool) -> None:
    """It may have come nevertheless. The disk has it still, and nobody warns."""
    simulation, [text, *_] = waiting()
    simulation.offer(make_submit("goes", text))
    while not simulation.copies:
        simulation.step()
    [transfer] = simulation.copies
    assert held(simulation, "goes")
    simulation.cancel("goes")
    simulation.offer(make_submit("comes", text))
    while not any(plan.dropped for plan in simulation.plans):
        simulation.step()
    assert [plan.dropped for plan in simulation.plans if plan.dropped] == [[transfer]]
    simulation.copies.remove(transfer)
    simulation.core.moved(simulation.model.move(transfer, ok=ends))
    simulation.core.check()
    simulation.run()
    assert copies(simulation.plans, "device") == [9, 9]
    assert simulation.deltas["comes"][0].cached_tokens == 36
    assert simulation.core.stats().tiers[0].failed == 0
    simulation.verify()


def test_what_another_waits_for_too_is_not_given_up() -> None:
    simulation, [text, *_] = waiting()
    for rid in ("goes", "stays"):
        simulation.offer(make_submit(rid, text))
    simulation.step()
    simulation.cancel("goes")
    simulation.run()
    assert not any(plan.dropped for plan in simulation.plans)
    assert copies(simulation.plans, "device") == [9]
    simulation.verify()


def test_a_store_is_asked_before_a_turn_comes() -> None:
    first, _ = shared()
    run(first, "first", LONG)
    second = Simulation(replace(first.limits, slots=1), before=first)
    second.offer(make_submit("runs", [1, 2, 3], 60))
    second.step()
    second.offer(make_submit("waits", LONG))
    while second.finish("runs") is None:
        second.step()
        second.end_a_copy(Random(0))
    assert copies(second.plans, "device") == [9]
    second.run()
    assert second.deltas["waits"][0].cached_tokens == 36
    second.core.check()


def test_hits_have_a_place_and_misses_a_reason() -> None:
    simulation = Simulation(
        make_limits(pages=81, context_len=700, step_tokens=64, tiers=[Tier("disk", [300], lasting=True)])
    )
    text = [(7 * i + i // 50) % 50 for i in range(301)]
    run(simulation, "new", text)
    simulation.core.flush_cache()
    run(simulation, "evicted", text)
    simulation.evict()
    run(simulation, "disk", text)
    run(simulation, "device", text[:101])
    sampling = RowSampling(prompt_logprobs=0)
    simulation.offer(make_submit("unread", text[:30], sampling=sampling))
    simulation.run()
    for rid, space in (("salt", "another"), ("adapter", "\1one\1")):
        simulation.offer(make_submit(rid, text, namespace=space))
        simulation.run()
    stats = simulation.core.stats()
    assert stats.hits == {"device": 100, "disk": 300}
    assert stats.misses == {
        **{"tail": 4 + 2, "parts": 0, "new": 300 + 44 + 44 + 44, "evicted": 256, "unread": 30},
        **{"salt": 256, "adapter": 256},
    }
    assert sum(stats.misses.values()) + sum(stats.hits.values()) == stats.query_tokens
    simulation.verify()


def test_what_another_server_has_computed_is_not_new_once_it_has_come() -> None:
    first = Simulation(
        make_limits(pages=81, context_len=700, step_tokens=64, tiers=[Tier("disk", [300], lasting=True)])
    )
    text = [(7 * i + i // 50) % 50 for i in range(301)]
    run(first, "new", text)
    second = Simulation(first.limits, before=first)
    run(second, "disk", text)
    second.offer(make_submit("salt", text, namespace="another"))
    second.run()
    second.core.flush_cache()
    run(second, "evicted", text)
    assert second.core.stats().hits == {"device": 0, "disk": 300}
    assert second.core.stats().misses == {"tail": 3, "parts": 0, "new": 44 + 44, "salt": 256, "evicted": 256}


def test_a_lost_checkpoint_is_a_reason() -> None:
    simulation = grouped(CacheGroup(3, every=16), pages=40, tiers=[])
    run(simulation, "first", [*LONG, 1, 2])
    run(simulation, "other", [*OTHER, 1, 2])
    run(simulation, "again", [*LONG, 3, 4])
    assert simulation.core.stats().misses["parts"] == 40


def test_a_copy_says_how_long_the_step_takes_that_reads_it() -> None:
    """Where nobody knows yet, and for a request whose turn has not come, it says nothing."""
    simulation = evicted()
    simulation.offer(make_submit("again", [*LONG, 1, 2]))
    simulation.submit_plans()
    [copy] = [copy for plan in simulation.plans for copy in plan.copies]
    assert copy.slack == 0.0
    simulation = evicted()
    for tokens in (1, 8, 64):
        simulation.core._costs.observe(tokens, tokens * tokens, 0.001 * (10 + tokens))
    simulation.offer(make_submit("again", [*LONG, 1, 2]))
    simulation.submit_plans()
    [copy] = [copy for plan in simulation.plans for copy in plan.copies]
    assert copy.slack == pytest.approx(0.012, rel=0.1)
