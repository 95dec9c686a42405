"""The code grader: runs a program in a sandbox, and compares outside of it what came out.

All test cases must pass; the first that does not decides the verdict, and the rest is skipped. Each
case has its own CPU limit (`rollpacker.policy.timeouts`: the anchor is the largest CPU time of a
correct run of that case so far) and a generous wall limit behind it.

A worker keeps one sandbox ready. It is used for one response, every test case in a fork of its own
with a fresh /tmp, and killed with all that is in it. Expected values stay here, or, for test code,
in a second sandbox that the solution cannot reach.

Trouble with a sandbox is GradingLostError: try again elsewhere, no reward yet.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rollpacker.policy.timeouts import TimeoutRules, time_limit
from rollpacker.types import Verdict
from services.reward.graders import outputs
from services.reward.graders.code_blocks import find_program
from services.reward.graders.code_reference import (
    CallCase,
    Case,
    CheckCase,
    CodeReference,
    ProgramCase,
    parse_reference,
)
from services.reward.graders.grader import (
    BadReferenceError,
    GraderUnavailableError,
    GradingLostError,
    GradingTask,
    ProgramOutcome,
    ProgramTask,
    Score,
    TestRun,
)
from services.reward.sandbox import canary
from services.reward.sandbox.command import SandboxSettings, SandboxUnavailableError
from services.reward.sandbox.inside import checks, solution, values
from services.reward.sandbox.process import Program, RunReport, Sandbox, SandboxLostError, drive

_BY_CODE = {
    solution.COMPILE_ERROR: Verdict.COMPILE_ERROR,
    solution.MEMORY_LIMIT: Verdict.MEMORY_LIMIT,
    solution.FILE_LIMIT: Verdict.FILE_LIMIT,
    solution.PROCESS_LIMIT: Verdict.PROCESS_LIMIT,
}
_BY_END = {
    "cpu": Verdict.TIMED_OUT,
    "wall": Verdict.TIMED_OUT,
    "output": Verdict.OUTPUT_LIMIT,
    "threads": Verdict.PROCESS_LIMIT,
}


@dataclass(frozen=True, slots=True)
class CodeSettings:
    """How code is run."""

    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    timeouts: TimeoutRules = field(default_factory=TimeoutRules)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> CodeSettings:
        """Empty settings are the defaults."""
        sandbox = dict(settings.get("sandbox", {}))
        if "packages" in sandbox:
            sandbox["packages"] = tuple(sandbox["packages"])
        return cls(SandboxSettings(**sandbox), TimeoutRules(**settings.get("timeouts", {})))


class CodeGrader:
    """See the module. Nothing of a response outlives its grading."""

    sealed = False  # it starts processes; it evaluates nothing
    keeps_own_limits = True
    late_is_verdict = True

    def __init__(self) -> None:
        self._settings = CodeSettings()
        self._spare: Sandbox | None = None

    def load(self, settings: Mapping[str, Any]) -> None:
        """Prove that code can be run safely here. Raises GraderUnavailableError."""
        self._settings = CodeSettings.from_json(settings)
        try:
            canary.check(self._settings.sandbox)
        except SandboxUnavailableError as error:
            raise GraderUnavailableError(str(error)) from error
        self.prepare()

    def prepare(self) -> None:
        """Start the sandbox of the next response."""
        if self._spare is None:
            self._spare = self._start()

    def end(self) -> None:
        """Kill the sandbox that waits. A worker's end does the same."""
        spare, self._spare = self._spare, None
        if spare:
            spare.kill()

    def check_reference(self, reference_json: str) -> None:
        parse_reference(reference_json)

    def grade_now(self, task: GradingTask) -> Score | None:
        """Decides only that there is no program; the reference may be large and is not read."""
        program = find_program(task.response_text)
        return Score(0.0, program) if isinstance(program, Verdict) else None

    def grade(self, task: GradingTask) -> Score:
        """Run the test cases until one fails."""
        reference = parse_reference(task.reference_json)
        program = find_program(task.response_text, reference.names)
        if isinstance(program, Verdict):
            return Score(0.0, program)
        sandboxes = [self._spare or self._start()]
        self._spare = None
        try:
            if isinstance(reference.cases[0], CheckCase):
                sandboxes.append(self._start())
            return self._score(task, reference, program, sandboxes)
        except SandboxLostError as error:
            raise GradingLostError(str(error)) from error
        finally:
            for sandbox in sandboxes:
                sandbox.kill()

    def run(self, task: ProgramTask) -> ProgramOutcome:
        """Run a program in a sandbox of its own. Raises GradingLostError."""
        sandbox, self._spare = self._spare or self._start(), None
        output = bytearray()
        settings = replace(
            self._settings.sandbox,
            memory_bytes=min(task.memory_bytes, self._settings.sandbox.memory_bytes),
        )
        job = settings.job(task.source, "program", task.cpu_seconds, setup={"traceback": True})
        try:
            program = Program(sandbox, job, output.extend)
            program.feed(task.stdin.encode("utf-8", "surrogateescape"))
            program.end_input()
            drive([program])
            stderr = sandbox.standard_error()
        except SandboxLostError as error:
            raise GradingLostError(str(error)) from error
        finally:
            sandbox.kill()
        assert program.report
        return ProgramOutcome(
            stdout=output.decode(errors="replace"), stderr=stderr, **asdict(program.report)
        )

    def _start(self) -> Sandbox:
        try:
            return Sandbox.start(self._settings.sandbox)
        except (SandboxLostError, SandboxUnavailableError) as error:
            raise GradingLostError(str(error)) from error

    def _score(
        self, task: GradingTask, reference: CodeReference, program: str, sandboxes: list[Sandbox]
    ) -> Score:
        runs: list[TestRun] = []
        for number, case in enumerate(reference.cases):
            name = str(number)
            if task.only_case not in ("", name):
                continue
            limit = time_limit(self._settings.timeouts, task.time_anchors.get(name))
            bench = _Bench(self._settings.sandbox, sandboxes, program, limit)
            verdict, report = bench.run(case)
            runs.append(TestRun(name, verdict, report.cpu_seconds, report.wall_seconds, limit))
            if verdict is not Verdict.CORRECT:
                break
        if not runs:
            raise BadReferenceError(f"only_case: there is no test case {task.only_case!r}")
        passed = sum(run.verdict is Verdict.CORRECT for run in runs)
        verdict = runs[-1].verdict
        return Score(
            1.0 if verdict is Verdict.CORRECT else 0.0,
            verdict,
            breakdown={"tests": float(len(reference.cases)), "tests_passed": float(passed)},
            runs=tuple(runs),
        )


class _Bench:
    """Runs one case; a verdict and the solution's report."""

    def __init__(
        self, settings: SandboxSettings, sandboxes: list[Sandbox], program: str, limit: float
    ) -> None:
        self._settings, self._sandboxes = settings, sandboxes
        self._program, self._limit = program, limit

    def run(self, case: Case) -> tuple[Verdict, RunReport]:
        if isinstance(case, ProgramCase):
            return self._run_program(case)
        if isinstance(case, CallCase):
            return self._run_call(case)
        return self._run_checks(case)

    def _run_program(self, case: ProgramCase) -> tuple[Verdict, RunReport]:
        output, report = self._run_alone("program", case.stdin.encode(), 4 * len(case.expected))
        verdict = _verdict(report)
        if verdict is Verdict.CORRECT and not outputs.same_output(output, case.expected):
            verdict = Verdict.INCORRECT
        return verdict, report

    def _run_call(self, case: CallCase) -> tuple[Verdict, RunReport]:
        arguments = [values.encode(item) for item in case.arguments]
        request = values.pack({"call": case.function, "args": arguments, "kwargs": {}})
        output, report = self._run_alone("calls", request, 0)
        verdict = _verdict(report)
        if verdict is Verdict.CORRECT:
            verdict = _call_verdict(case, output)
        return verdict, report

    def _run_alone(self, mode: str, stdin: bytes, expected: int) -> tuple[bytes, RunReport]:
        """Run without a checker. Where much is expected more output is allowed, a power of two."""
        settings = self._settings
        if expected > settings.output_bytes:
            settings = replace(settings, output_bytes=1 << expected.bit_length())
        output = bytearray()
        job = settings.job(self._program, mode, self._limit)
        running = Program(self._sandboxes[0], job, output.extend)
        running.feed(stdin)
        running.end_input()
        drive([running])
        assert running.report
        return bytes(output), running.report

    def _run_checks(self, case: CheckCase) -> tuple[Verdict, RunReport]:
        """The solution here, the test code there, and bytes carried between the two."""
        solver = Program(
            self._sandboxes[0],
            self._settings.job(self._program, "calls", self._limit),
            lambda data: checker.feed(data),  # noqa: PLW0108  it comes to be below
        )
        setup = {"names": case.names, "entry_point": case.entry_point}
        checker = Program(
            self._sandboxes[1],
            self._settings.job(case.source, "checks", self._limit, setup),
            solver.feed,
        )

        def end(program: Program) -> None:
            if program is solver:
                checker.end_input()
            else:
                solver.stop()

        drive([solver, checker], end)
        assert solver.report
        assert checker.report
        return _checked_verdict(solver.report, checker.report), solver.report


def _verdict(report: RunReport) -> Verdict:
    """What a report alone says; CORRECT means that there is something to compare."""
    if report.ended_by in _BY_END:
        return _BY_END[report.ended_by]
    if report.ended_by == "exit" and report.code == 0:
        return Verdict.CORRECT
    return _BY_CODE.get(report.code, Verdict.CRASHED)


def _call_verdict(case: CallCase, output: bytes) -> Verdict:
    """The first answer is the only one asked for. Hostile bytes are a wrong answer."""
    size = values.LENGTH.size
    try:
        (length,) = values.LENGTH.unpack(output[:size])
        answer = values.unpack(output[size : size + length], values.read_int)
        if "raised" in answer:
            return Verdict.CRASHED
        got = values.decode(answer.get("value"), lambda _: _UNEQUAL)
        same = outputs.same_value(got, case.expected) or (
            case.wrapped and outputs.same_value(got, case.unwrapped)
        )
    except (values.NotDataError, struct.error, RecursionError):
        return Verdict.INCORRECT
    return Verdict.CORRECT if same else Verdict.INCORRECT


_UNEQUAL = object()  # what is no data equals nothing


def _checked_verdict(solver: RunReport, checker: RunReport) -> Verdict:
    """The checker knows whether the tests passed; the solution's own end explains a failure."""
    if checker.ended_by == "exit" and checker.code == 0:
        return Verdict.CORRECT
    of_solver = _verdict(solver)
    if solver.ended_by != "killed" and of_solver is not Verdict.CORRECT:
        return of_solver
    if checker.ended_by in ("cpu", "wall"):
        return Verdict.TIMED_OUT
    if checker.code == checks.SOLUTION_RAISED:
        return Verdict.CRASHED
    return Verdict.INCORRECT
