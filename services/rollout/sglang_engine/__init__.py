"""SGLang behind the `Engine` protocol, as a server process of its own.

client          what SGLang is asked over HTTP, and its errors
launch          the command and environment of a server
server_process  one server process: started, watched, killed
served_model    the model directory that a server is shown, and the proof that it arrived
replay_probe    whether a server honours seeds, found out by asking it
group_stream    the requests of one `generate` call while they run
engine          `SglangEngine`: all of it together
"""

from services.rollout.sglang_engine.engine import SglangEngine
from services.rollout.sglang_engine.launch import SglangOptions

__all__ = ["SglangEngine", "SglangOptions"]
