"""The rules of device leases, and that no sequence of requests breaks their promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollpacker.devices.lease import (
    Claim,
    DevicesBusyError,
    Grant,
    Leases,
    MemoryNotFreedError,
    StaleLeaseError,
    claim,
    release,
    renew,
)

FULL = 80  # bytes of a device


def wants(owner: str, count: int = 1, needed: int = 60, **free: int) -> Claim:
    """`free`: of each device by name; by default of two that are empty."""
    return Claim(owner, count, needed, free or {"d0": FULL, "d1": FULL}, seconds=10)


def test_a_device_that_is_held_is_not_given_again_though_its_memory_is_free() -> None:
    state, _ = claim(Leases(), wants("rollout-0", 2), now=0)
    with pytest.raises(DevicesBusyError, match="d0: held by rollout-0, fence 1, for 6.0 s"):
        claim(state, wants("trainer-0"), now=4)


def test_claims_of_several_replicas_get_devices_of_their_own() -> None:
    state = Leases()
    for index in range(2):
        state, grant = claim(state, wants(f"rollout-{index}"), now=0)
        assert grant == Grant(f"rollout-{index}", index + 1, (f"d{index}",))
    with pytest.raises(DevicesBusyError, match="could have 0"):
        claim(state, wants("rollout-2"), now=0)


def test_devices_come_in_the_order_of_the_driver_and_the_owner_s_own_first() -> None:
    free = {"GPU-z": FULL, "GPU-a": FULL, "GPU-m": FULL}
    state, grant = claim(Leases(), wants("rollout-0", 2, **free), now=0)
    assert grant.devices == ("GPU-z", "GPU-a")
    state, grant = claim(state, wants("rollout-0", 1, **dict(reversed(free.items()))), now=0)
    assert grant.devices == ("GPU-a",)


def test_all_devices_of_a_claim_are_given_or_none() -> None:
    state, _ = claim(Leases(), wants("rollout-0"), now=0)
    with pytest.raises(DevicesBusyError, match="wants 2 of 2 devices and could have 1"):
        claim(state, wants("trainer-0", 2), now=0)
    assert state.leases.keys() == {"d0"}


def test_nobody_wakes_before_the_memory_that_it_needs_is_measured_to_be_free() -> None:
    state, first = claim(Leases(), wants("rollout-0", d0=FULL), now=0)
    with pytest.raises(MemoryNotFreedError, match="d0: 50 bytes"):
        release(state, first, {"d0": 30})
    state = release(state, first, {"d0": FULL})
    with pytest.raises(DevicesBusyError, match="59 bytes free of 60 needed"):
        claim(state, wants("trainer-0", d0=59), now=1)
    state, second = claim(state, wants("trainer-0", d0=60), now=1)
    assert second.fence == first.fence + 1


def test_a_side_may_leave_what_it_keeps_behind() -> None:
    state, grant = claim(Leases(), wants("trainer-0", d0=FULL), now=0)
    assert release(state, grant, {"d0": FULL - 20}, kept_bytes=20).leases == {}


def test_a_dead_owner_s_device_is_given_when_its_time_is_over() -> None:
    state, dead = claim(Leases(), wants("rollout-0", d0=FULL), now=0)
    state, grant = claim(state, wants("rollout-1", d0=FULL), now=10)
    assert grant.fence > dead.fence


def test_an_owner_that_hangs_keeps_the_device_as_long_as_it_keeps_the_memory() -> None:
    state, _ = claim(Leases(), wants("rollout-0", d0=FULL), now=0)
    with pytest.raises(DevicesBusyError, match="20 bytes free of 60 needed, last held by rollout"):
        claim(state, wants("trainer-0", d0=20), now=100)


def test_a_late_release_or_renewal_changes_nothing() -> None:
    state, late = claim(Leases(), wants("rollout-0", d0=FULL), now=0)
    state, _ = claim(state, wants("trainer-0", d0=FULL), now=10)
    with pytest.raises(StaleLeaseError, match="rollout-0 with fence 1 does not hold"):
        release(state, late, {"d0": FULL})
    with pytest.raises(StaleLeaseError):
        renew(state, late, seconds=10, now=11)


def test_a_grant_of_a_registry_that_was_lost_holds_nothing_in_the_new_one() -> None:
    """Its fences begin at 1 again."""
    _, lost = claim(Leases(), wants("rollout-0", d0=FULL), now=0)
    state, new = claim(Leases(), wants("rollout-1", d0=FULL), now=1)
    assert lost.fence == new.fence
    with pytest.raises(StaleLeaseError):
        renew(state, lost, seconds=10, now=2)
    with pytest.raises(StaleLeaseError):
        release(state, lost, {"d0": FULL})


@pytest.mark.parametrize("name", ["rollout-1", "another-name"])
def test_a_worker_that_was_restarted_leaves_alone_what_another_is_bound_to(name: str) -> None:
    """Two engines sleep, the trainer has used the first one's device, the second is restarted."""
    free = {"d0": FULL, "d1": FULL}
    state, first = claim(Leases(), wants("rollout-0", **free), now=0)
    state, second = claim(state, wants("rollout-1", **free), now=0)
    state = release(release(state, first, free), second, free)
    state, turn = claim(state, wants("trainer-0", **free), now=1)
    assert turn.devices == ("d0",)
    state = release(state, turn, free)
    _, again = claim(state, wants(name, **free), now=2)
    assert again.devices == ("d1",)


def test_a_lease_that_lapsed_can_be_renewed_while_nobody_else_came() -> None:
    state, grant = claim(Leases(), wants("rollout-0", d0=FULL), now=0)
    state = renew(state, grant, seconds=10, now=50)
    with pytest.raises(DevicesBusyError):
        claim(state, wants("trainer-0", d0=FULL), now=59)


def test_a_restarted_owner_gets_its_device_at_once_and_its_old_self_is_stale() -> None:
    state, old = claim(Leases(), wants("rollout-1", d1=FULL), now=0)
    state, new = claim(state, wants("rollout-1"), now=1)
    assert new.devices == ("d1",)
    with pytest.raises(StaleLeaseError):
        release(state, old, {"d1": FULL})


def as_guest(owner: str, needed: int = 10, **free: int) -> Claim:
    return replace(wants(owner, needed=needed, **free), as_guest=True)


def test_a_guest_shares_a_device_where_there_is_room_and_is_alone_of_its_kind() -> None:
    state, holder = claim(Leases(), wants("rollout-0", d0=FULL), now=0)
    with pytest.raises(DevicesBusyError, match="9 bytes free of 10 needed"):
        claim(state, as_guest("reward-0", d0=9), now=1)
    state, guest = claim(state, as_guest("reward-0", d0=10), now=1)
    with pytest.raises(DevicesBusyError, match="held by reward-0"):
        claim(state, as_guest("reward-1", d0=10), now=2)
    state = renew(renew(state, holder, 10, now=5), guest, 10, now=5)
    state = release(state, guest, {"d0": 0})  # the holder has grown meanwhile
    assert (state.guests, state.leases.keys()) == ({}, {"d0"})
    with pytest.raises(StaleLeaseError):
        renew(state, guest, 10, now=6)


def test_a_holder_that_was_restarted_gets_its_device_back_beside_a_guest() -> None:
    state, _ = claim(Leases(), wants("rollout-0", d0=FULL), now=0)
    state, guest = claim(state, as_guest("reward-0", d0=20), now=1)
    state, _ = claim(state, wants("rollout-0", d0=80), now=2)
    assert renew(state, guest, 10, now=3).guests["d0"].owner == "reward-0"


def test_nobody_becomes_the_holder_beside_a_guest_unless_it_has_lapsed() -> None:
    state, guest = claim(Leases(), as_guest("reward-0", d0=FULL), now=0)
    with pytest.raises(DevicesBusyError, match="d0: shared by the guest reward-0, fence 1"):
        claim(state, wants("trainer-0", d0=FULL), now=9)
    state, _ = claim(state, wants("trainer-0", d0=FULL), now=10)
    with pytest.raises(StaleLeaseError):
        renew(state, guest, 10, now=11)


class Host(RuleBasedStateMachine):
    """Owners, with a model of the devices' memory: what each grant says, and what is used."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.now = Leases(), 0.0
        self.used = dict.fromkeys(("d0", "d1", "d2"), 0)
        self.grants: list[tuple[Grant, int]] = []  # every grant ever, with what its owner uses
        self.fences = [0]

    def free(self) -> Mapping[str, int]:
        return {device: FULL - used for device, used in self.used.items()}

    @rule(owner=st.sampled_from("abc"), count=st.integers(1, 3), needed=st.integers(1, FULL),
          seconds=st.integers(1, 10), guest=st.booleans())  # fmt: skip
    def claims(self, owner: str, count: int, needed: int, seconds: int, guest: bool) -> None:
        owner = owner.upper() if guest else owner
        free, before = self.free(), self.state
        request = Claim(owner, count, needed, free, seconds, guest)
        try:
            self.state, grant = claim(before, request, self.now)
        except DevicesBusyError:
            return
        assert len(grant.devices) == count
        for device in grant.devices:
            assert free[device] >= needed
            held = (before.guests if guest else before.leases).get(device)
            assert held is None or held.owner == owner or held.expires <= self.now
            shared, back = before.guests.get(device), before.leases.get(device)
            is_own = back is not None and back.owner == owner
            assert guest or is_own or shared is None or shared.expires <= self.now
            self.used[device] += needed
        self.grants.append((grant, needed))
        self.fences.append(grant.fence)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), frees=st.booleans())
    def releases(self, data: st.DataObject, frees: bool) -> None:
        index = data.draw(st.integers(0, len(self.grants) - 1))
        grant, using = self.grants[index]
        if frees:
            for device in grant.devices:
                self.used[device] -= using
            self.grants[index] = (grant, 0)
        before = self.state
        try:
            self.state = release(before, grant, self.free())
        except (StaleLeaseError, MemoryNotFreedError):
            return
        table, left = before.leases, self.state.leases
        if grant.owner.isupper():
            table, left = before.guests, self.state.guests
        assert all(table[device].fence == grant.fence for device in grant.devices)
        assert not left.keys() & set(grant.devices)

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def renews(self, data: st.DataObject) -> None:
        grant, _ = data.draw(st.sampled_from(self.grants))
        try:
            self.state = renew(self.state, grant, 5, self.now)
        except StaleLeaseError:
            return
        table = self.state.guests if grant.owner.isupper() else self.state.leases
        assert all(table[d].expires == self.now + 5 for d in grant.devices)

    @rule(seconds=st.integers(1, 12))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def memory_is_never_overbooked_and_fences_only_grow(self) -> None:
        assert all(0 <= used <= FULL for used in self.used.values())
        assert self.fences == sorted(set(self.fences))
        assert all(lease.fence <= self.state.fence for lease in self.state.leases.values())


TestHost = Host.TestCase
