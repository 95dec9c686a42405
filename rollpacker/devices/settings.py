"""What a worker that uses GPUs may be told about its devices."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from rollpacker.devices.fake import FakeMeter
from rollpacker.devices.memory import Meter, NvidiaMeter
from rollpacker.settings import WorkerSettings


class DeviceWorkerSettings(WorkerSettings):
    """A worker that claims GPUs from the coordinator. Workers on a CPU claim none."""

    device_leases: bool = Field(
        True, description="with device cuda: claim GPUs from the coordinator; off: all that it sees"
    )
    devices: tuple[str, ...] = Field(
        (),
        description="GPUs that may be claimed, by nvidia-smi's index or UUID, as a JSON list;"
        " default: all that nvidia-smi shows",
    )
    device_share: float = Field(
        0.8,
        gt=0,
        le=1,
        description="share of a GPU's memory that must be free before it is claimed, and again"
        " before it is given back; the rest is for what processes that take turns leave there",
    )
    fake_devices: Path | None = Field(
        None, description="for tests: a directory of fake GPUs (a memory meter), claimed on a CPU"
    )

    def meter_for(self, device: str) -> Meter | None:
        """Measures the GPUs that are to be claimed for `device`; None: nothing is claimed."""
        if self.fake_devices is not None:
            return FakeMeter(self.fake_devices, self.devices)
        if self.device_leases and device == "cuda":
            return NvidiaMeter(self.devices)
        return None
