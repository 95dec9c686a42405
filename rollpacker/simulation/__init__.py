"""The policy on a virtual clock: the same objects as in the live coordinator, two cores, any size.

    workload (lengths) ----+
                           v
    tail_batching.plan -> Round.handle <- events -- engine model (replicas, KV, preemption)
         ^                 | commands                reward model (dispatcher, sandbox, judge)
         +--- backlog <----+----------> launches     trainer model (streamed groups, update)

`simulator` joins them: it carries out the commands of a `Round` on the models and feeds it the
models' events, each at its time. It never decides who wins, what is deferred or what runs next.
`paper` compares the result with the published figures, `compare` goes beyond them, `calibration`
fits the parameters of `parameters.json`. Nothing here reads a real clock or an unseeded generator,
apart from the reports that say how long they took.
"""
