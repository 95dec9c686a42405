"""The leases of all devices: a state machine without clock or I/O.

    free ----claim: enough memory is free--------> held by (owner, fence)
    held ----release: its memory is free again---> free
    held ----its time is over--------------------> lapsed: still the owner's, but anyone may claim
    lapsed --claim by another: enough is free----> held by the other, with a higher fence
    held, lapsed --renew------------------------> held

A claim names how much memory it needs, and how much was measured to be free: a device is given only
to a side that has room there, so nobody wakes before the other side's memory is really free. A
release brings the measure too, and is refused while the memory is not back. A process that died
leaves its memory to the driver; one that only hangs keeps it, so its device cannot be claimed,
lapsed or not, by a side that needs that memory.

A device is named by its UUID, which no other device in the world has: so nobody needs to agree on
the names of hosts, and containers that number their GPUs differently cannot mix them up.

A *guest* shares a device with whoever holds it: it is let in where the memory that it names is
free, one guest at a time. Its leaving needs no measure, as the holder's use may have grown. Nobody
becomes the holder while a guest is there.

What never happens: a device with two owners, or two guests; a fence that is given twice; a change
by a fence that is not the device's. An owner that claims again (it was restarted) loses its old
fence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_USERS = 8  # of a device that are remembered


@dataclass(frozen=True, slots=True)
class Lease:
    """One device in the hands of an owner."""

    owner: str
    fence: int
    expires: float  # seconds of the store's clock
    free_bytes: int  # measured when it was given


@dataclass(frozen=True, slots=True)
class Leases:
    """All of them."""

    fence: int = 0  # the last that was given
    leases: Mapping[str, Lease] = field(default_factory=dict)  # by device; free ones are left out
    guests: Mapping[str, Lease] = field(default_factory=dict)  # by device
    # Who held a device, newest last, until it was given another: such a process may be bound to it.
    users: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """An owner wants `count` devices, all or none."""

    owner: str
    count: int
    needed_bytes: int  # on each
    free_bytes: Mapping[str, int]  # measured just now, of each that would do, in driver's order
    seconds: float  # for how long, unless renewed
    as_guest: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """Devices that an owner may use from now on."""

    owner: str
    fence: int
    devices: tuple[str, ...]


class DevicesBusyError(Exception):
    """Not enough devices can be given now; the message says who holds which and what is missing."""


class StaleLeaseError(Exception):
    """The caller's fence is not that of the device any more; it must let go of it."""


class MemoryNotFreedError(Exception):
    """The memory of a device is not back; the lease stays with its owner."""


def claim(state: Leases, request: Claim, now: float) -> tuple[Leases, Grant]:
    """Give `count` of the devices: first what is or was the owner's, then what the fewest others
    have used, last what lapsed to another.

    Raises DevicesBusyError.
    """
    table = state.guests if request.as_guest else state.leases
    # A guest came when the owner was there: one that claims its own again does not mind it.
    own = {d for d, lease in state.leases.items() if lease.owner == request.owner}
    in_the_way = {
        device: guest
        for device, guest in state.guests.items()
        if device not in own and not request.as_guest
    }
    kept = {d: lease for d, lease in table.items() if lease.owner != request.owner}
    reasons = {
        device: why
        for device, free in request.free_bytes.items()
        if (why := _why_not(kept.get(device), in_the_way.get(device), request, free, now))
    }
    fit = sorted(  # stable: else as the driver orders them
        (device for device in request.free_bytes if device not in reasons),
        key=lambda device: (
            device in kept,
            device not in table,
            request.owner not in state.users.get(device, ()),
            len(state.users.get(device, ())),
        ),
    )
    if len(fit) < request.count:
        said = "; ".join(f"{d}: {why}" for d, why in sorted(reasons.items()))
        raise DevicesBusyError(
            f"{request.owner} wants {request.count} of {len(request.free_bytes)} devices and"
            f" could have {len(fit)}; {said}"
        )
    fence, devices = state.fence + 1, tuple(fit[: request.count])
    expires = now + request.seconds
    given = {d: Lease(request.owner, fence, expires, request.free_bytes[d]) for d in devices}
    grant = Grant(request.owner, fence, devices)
    if request.as_guest:
        return replace(state, fence=fence, guests=kept | given), grant
    gone = in_the_way.keys() & devices
    guests = {device: guest for device, guest in state.guests.items() if device not in gone}
    return Leases(fence, kept | given, guests, _used(state, request.owner, devices)), grant


def renew(state: Leases, grant: Grant, seconds: float, now: float) -> Leases:
    """Hold on, also after the time was over if nobody else came. Raises StaleLeaseError."""
    own, are_guests = _own(state, grant)
    renewed = {device: replace(lease, expires=now + seconds) for device, lease in own.items()}
    if are_guests:
        return replace(state, guests={**state.guests, **renewed})
    return replace(state, leases={**state.leases, **renewed})


def release(
    state: Leases, grant: Grant, free_bytes: Mapping[str, int], kept_bytes: int = 0
) -> Leases:
    """Give all devices back, once as much is free on each as when it was given; the owner may stay
    there with `kept_bytes`. Raises StaleLeaseError, MemoryNotFreedError.
    """
    own, are_guests = _own(state, grant)
    if are_guests:
        return replace(state, guests={d: g for d, g in state.guests.items() if d not in own})
    missing = {
        device: lease.free_bytes - kept_bytes - free_bytes[device] for device, lease in own.items()
    }
    over = {device: size for device, size in missing.items() if size > 0}
    if over:
        said = "; ".join(f"{d}: {size} bytes" for d, size in sorted(over.items()))
        raise MemoryNotFreedError(f"{grant.owner} has not freed its memory: {said}")
    left = {d: lease for d, lease in state.leases.items() if d not in missing}
    return replace(state, leases=left)


def _used(state: Leases, owner: str, devices: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    """The users of all devices when an owner has been given these."""
    others = {
        device: tuple(user for user in users if user != owner)
        for device, users in state.users.items()
    }
    given = {d: (*others.get(d, ()), owner)[-_USERS:] for d in devices}
    return {device: users for device, users in (others | given).items() if users}


def _own(state: Leases, grant: Grant) -> tuple[dict[str, Lease], bool]:
    """The leases of a grant, and whether they are a guest's. Raises StaleLeaseError unless all are
    there."""
    who = (grant.owner, grant.fence)
    guests = {d: each for d, each in state.guests.items() if (each.owner, each.fence) == who}
    leases = {d: each for d, each in state.leases.items() if (each.owner, each.fence) == who}
    own = leases | guests
    if set(own) != set(grant.devices):
        raise StaleLeaseError(
            f"{grant.owner} with fence {grant.fence} does not hold {', '.join(grant.devices)}"
            " any more"
        )
    return own, bool(guests)


def _why_not(
    lease: Lease | None, guest: Lease | None, request: Claim, free: int, now: float
) -> str:
    """Why a device cannot be given; empty when it can. `guest`: only where one is in the way."""
    for who, words in ((lease, "held by"), (guest, "shared by the guest")):
        if who is not None and now < who.expires:
            return f"{words} {who.owner}, fence {who.fence}, for {who.expires - now:.1f} s"
    if free < request.needed_bytes:
        last = f", last held by {lease.owner}" if lease else ""
        return f"{free} bytes free of {request.needed_bytes} needed{last}"
    return ""
