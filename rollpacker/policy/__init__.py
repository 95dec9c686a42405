"""What to do, decided purely: no clock, no randomness, no I/O.

`tail_batching.plan` says what the next round launches; `round.Round` is the state machine of one
round; the rest are small rules that they, the coordinator and the simulator call.
"""
