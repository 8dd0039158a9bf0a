"""A point is passed, or has one owner of its verdict, whatever the order of arrivals and missed deadlines."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.sync.points import MAX_WORLD, POISON, Count, StoreKeys, read, ticket


def test_a_sum_says_who_is_there_and_who_gave_up():
    total = 2 * ticket("save") + 3 * POISON
    assert read(total, "save") == Count(arrived=2, poisons=3, agreed=True)
    assert read(0, "save") == Count(arrived=0, poisons=0, agreed=True)


def test_another_name_is_seen_by_whoever_reads():
    total = 2 * ticket("save") + ticket("evaluate")
    assert not read(total, "save").agreed
    assert not read(total, "evaluate").agreed


def test_fields_of_the_largest_world_do_not_spill_and_fit_64_bits():
    name = max((f"point {i}" for i in range(1000)), key=ticket)
    total = MAX_WORLD * (ticket(name) + POISON)
    assert total < 2**63
    assert read(total, name) == Count(arrived=MAX_WORLD, poisons=MAX_WORLD, agreed=True)


@given(world=st.integers(2, 9), data=st.data())
def test_each_order_has_one_outcome(world, data):
    """A rank comes, and may give up at any moment after it came."""
    impatient = data.draw(st.sets(st.integers(0, world - 1)))
    events = data.draw(st.permutations([("arrive", rank) for rank in range(world)] + [("poison", rank) for rank in impatient]))
    total, passed, owners, here = 0, [], [], set()
    for event, rank in events:
        if event == "arrive":
            total += ticket("save")
            here.add(rank)
            count = read(total, "save")
            if count.arrived == world and not count.poisons:
                passed.append(rank)
        elif rank in here:
            total += POISON
            count = read(total, "save")
            if count.poisons == 1 and count.arrived < world:
                owners.append(rank)
    assert len(passed) + len(owners) == 1


def test_meetings_with_different_prefixes_share_no_key():
    one, two = StoreKeys("a/"), StoreKeys("b/")
    assert one.count(3) != two.count(3)
    assert one.failed != two.failed
    keys = [one.card(1), one.count(1), one.result(1), one.mail(1), one.reply(1, 1), one.left(1), one.failed]
    assert len(set(keys)) == len(keys)
