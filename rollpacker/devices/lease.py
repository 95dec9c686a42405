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

What never happens: a device with two owners; a fence that is given twice; a change by a fence that
is not the device's. An owner that claims again (it was restarted) loses its old fence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


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


@dataclass(frozen=True, slots=True)
class Claim:
    """An owner wants `count` devices, all or none."""

    owner: str
    count: int
    needed_bytes: int  # on each
    free_bytes: Mapping[str, int]  # measured just now, of each that would do, in driver's order
    seconds: float  # for how long, unless renewed


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
    """Give `count` of the devices: first what was the owner's, last what lapsed to another.

    Raises DevicesBusyError.
    """
    kept = {d: lease for d, lease in state.leases.items() if lease.owner != request.owner}
    reasons = {
        device: why
        for device, free in request.free_bytes.items()
        if (why := _why_not(kept.get(device), request.needed_bytes, free, now))
    }
    fit = sorted(  # stable: else as the driver orders them
        (device for device in request.free_bytes if device not in reasons),
        key=lambda device: (device in kept, device not in state.leases),
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
    return Leases(fence, kept | given), Grant(request.owner, fence, devices)


def renew(state: Leases, grant: Grant, seconds: float, now: float) -> Leases:
    """Hold on, also after the time was over if nobody else came. Raises StaleLeaseError."""
    own = _own(state, grant)
    renewed = {device: replace(lease, expires=now + seconds) for device, lease in own.items()}
    return replace(state, leases={**state.leases, **renewed})


def release(
    state: Leases, grant: Grant, free_bytes: Mapping[str, int], kept_bytes: int = 0
) -> Leases:
    """Give all devices back, once as much is free on each as when it was given; the owner may stay
    there with `kept_bytes`. Raises StaleLeaseError, MemoryNotFreedError.
    """
    missing = {
        device: lease.free_bytes - kept_bytes - free_bytes[device]
        for device, lease in _own(state, grant).items()
    }
    over = {device: size for device, size in missing.items() if size > 0}
    if over:
        said = "; ".join(f"{d}: {size} bytes" for d, size in sorted(over.items()))
        raise MemoryNotFreedError(f"{grant.owner} has not freed its memory: {said}")
    left = {d: lease for d, lease in state.leases.items() if d not in missing}
    return replace(state, leases=left)


def _own(state: Leases, grant: Grant) -> dict[str, Lease]:
    """The leases of a grant. Raises StaleLeaseError unless all are there."""
    own = {
        device: lease
        for device, lease in state.leases.items()
        if (lease.owner, lease.fence) == (grant.owner, grant.fence)
    }
    if set(own) != set(grant.devices):
        raise StaleLeaseError(
            f"{grant.owner} with fence {grant.fence} does not hold {', '.join(grant.devices)}"
            " any more"
        )
    return own


def _why_not(lease: Lease | None, needed: int, free: int, now: float) -> str:
    """Why a device cannot be given; empty when it can."""
    if lease is not None and now < lease.expires:
        return f"held by {lease.owner}, fence {lease.fence}, for {lease.expires - now:.1f} s"
    if free < needed:
        last = f", last held by {lease.owner}" if lease else ""
        return f"{free} bytes free of {needed} needed{last}"
    return ""
