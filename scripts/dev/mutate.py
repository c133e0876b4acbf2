"""Apply one-line faults to a copy of the repository, one at a time, and check that the tests notice each.

The faults are data: tests/faults.toml. The checkout itself is never changed.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import importlib.util
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FAULTS = "tests/faults.toml"
RECORD = "FLEX_MUTATE_RECORD"  # what scripts/dev/mutate_record.py reads
NOTICED = "noticed"
MISSING_NAME = re.compile(r"has no attribute '(\w+)'|name '(\w+)' is not defined|variable '(\w+)' where")
WORD = re.compile(r"\w+")
WIDTH = 200  # characters that are shown of what a test said
TAIL = 1500  # characters of pytest's output that are shown of a run that came to nothing


class FaultError(ValueError):
    """A fault that cannot be applied, or a list of faults that cannot be read."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: its name, once in the list.
        fault: what is wrong with it applied, in a sentence.
        file: which file it is in, relative to the repository.
        before: a text that occurs once in that file.
        after: what replaces it.
        tests: node ids, or files, of the tests that are expected to notice it.
    """

    name: str
    fault: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


@dataclass
class Run:
    """What one run of pytest did.

    Attributes:
        status: its exit status; None if it was killed at the time limit.
        seconds: how long it took.
        passed: node ids of the tests that passed.
        failed: the same of those that failed, the first one first.
        message: why the first one did.
        output: what it printed, the end of it.
    """

    status: int | None
    seconds: float
    passed: list[str]
    failed: list[str]
    message: str
    output: str


@dataclass
class Result:
    """What came of one fault.

    Attributes:
        name: the fault's name.
        outcome: `noticed`, `survived` (its tests passed), or why nothing is known: `broken` (its tests fail
            without it, cannot be collected, or are all skipped), `anchor` (it cannot be applied), `timeout`.
        seconds: how long its tests took.
        by: the first test that failed.
        why: what that test said; or more of why it was not noticed.
        fault: what was applied.
    """

    name: str
    outcome: str
    seconds: float = 0.0
    by: str = ""
    why: str = ""
    fault: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """The result as it is printed: on a line, and behind it who noticed it, or what pytest printed."""
        text = f"{self.outcome:9}{self.seconds:6.1f} s  {self.name}"
        if self.by:
            return f"{text}\n    {self.by}\n    {' '.join(self.why.split())[:WIDTH]}"
        return text + (f"\n{self.why}" if self.why else "")


# -- the list ----------------------------------------------------------------------------------------


def read_faults(path: Path) -> list[Fault]:
    """The faults of a TOML file.

    Raises:
        FaultError: a field is missing, unknown or of another type, a name occurs twice, or there is no test.
    """
    names = {f.name for f in fields(Fault)}
    faults: list[Fault] = []
    for number, table in enumerate(tomllib.loads(path.read_text(encoding="utf-8")).get("fault", []), 1):
        label = f"{path.name}: fault {number} ({table.get('name', 'without a name')})"
        if table.keys() != names:
            raise FaultError(f"{label} has the fields {sorted(table)}; each has {sorted(names)}")
        texts = [table[n] for n in sorted(names - {"tests"})]
        if not all(isinstance(t, str) for t in texts) or not table["tests"]:
            raise FaultError(
                f"{label}: every field is a string, and `tests` a list with at least one of them"
            )
        if any(f.name == table["name"] for f in faults):
            raise FaultError(f"{label}: the name occurs twice; give it another")
        faults.append(Fault(**{**table, "tests": tuple(table["tests"])}))
    if not faults:
        raise FaultError(f"{path} has no [[fault]]")
    return faults


def mutated(fault: Fault, root: Path) -> str:
    """The text of the fault's file with the fault applied.

    Raises:
        FaultError: there is no such file, `before` does not occur exactly once in it, nothing changes, or the
            result does not compile.
    """
    path = root / fault.file
    if not path.is_file():
        raise FaultError(f"there is no file {fault.file}: say where the code is now")
    text = path.read_text(encoding="utf-8")
    count = text.count(fault.before) if fault.before else 0
    if count != 1:
        raise FaultError(f"its `before` occurs {count} times in {fault.file}, not once: update it")
    changed = text.replace(fault.before, fault.after)
    if changed == text:
        raise FaultError("its `after` is its `before`")
    try:
        if path.suffix == ".py":  # scripts and styles of the page have faults too
            compile(changed, fault.file, "exec")
    except SyntaxError as error:
        raise FaultError(f"{fault.file} does not compile with it: {error}") from None
    return changed


# -- the copy ----------------------------------------------------------------------------------------


def repository_files(root: Path) -> list[str]:
    """The files of the checkout that git tracks or would track, as they are now."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sorted({n for n in listed.split("\0") if n and (root / n).is_file()})


def copy_repository(root: Path, folder: Path) -> None:
    """Copy these files to an empty folder."""
    for name in repository_files(root):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, folder / name)


def digest(root: Path) -> str:
    """A hash of all files but the list of faults: results of another state are not used again."""
    found = hashlib.sha256()
    for name in repository_files(root):
        if name != FAULTS:
            found.update(f"{name}\0".encode() + (root / name).read_bytes())
    return found.hexdigest()


def environment(folder: Path) -> dict[str, str]:
    """What makes a process, and all that it starts, import the package from the copy."""
    paths = [
        str(folder),
        str(folder / "scripts"),
        str(folder / "scripts" / "dev"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def check_import(folder: Path, package: str) -> None:
    """Make sure that a process elsewhere imports the package from the copy.

    Raises:
        FaultError: it does not; every fault would seem to survive.
    """
    command = [sys.executable, "-c", f"import {package}; print({package}.__file__)"]
    done = subprocess.run(command, cwd="/", env=environment(folder), capture_output=True, text=True)
    found = done.stdout.strip()
    if done.returncode or not Path(found).resolve().is_relative_to(folder.resolve()):
        raise FaultError(f"{package} is imported from {found or done.stderr.strip()}, not from {folder}")


# -- running tests -----------------------------------------------------------------------------------


class Processes:
    """The runs of pytest that are going on, to end all of them when a person interrupts."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()

    def call(self, command: Sequence[str], limit: float, **settings: Any) -> tuple[int | None, str]:
        """Run a command in a session of its own; its exit status (None past the limit) and its output."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            settings |= {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command, start_new_session=True, text=True, **settings)
            with self._lock:
                self._running.add(process)
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                self._end(process)
            output.seek(0)
            return status, output.read()[-TAIL:]

    def end(self) -> None:
        """Kill all that run."""
        with self._lock:
            running = list(self._running)
        for process in running:
            self._end(process)

    def _end(self, process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also ranks that a test left behind
        process.wait()
        with self._lock:
            self._running.discard(process)


processes = Processes()


def run_pytest(folder: Path, arguments: Iterable[str], limit: float) -> Run:
    """Run pytest in the copy."""
    with tempfile.TemporaryDirectory(prefix="flex-mutate-record-") as scratch:
        record = Path(scratch) / "record"
        record.touch()
        plugins = ["-p", "no:cacheprovider", "-p", "mutate_record"]
        command = [sys.executable, "-m", "pytest", "-q", *plugins, *arguments]
        start = time.monotonic()
        env = {**environment(folder), RECORD: str(record)}
        status, output = processes.call(command, limit, cwd=folder, env=env)
        seconds = time.monotonic() - start
        lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    names: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for line in lines:
        names[line["outcome"]].append(line["test"])
    message = next((line["message"] for line in lines if line["message"]), "")
    return Run(status, seconds, names["passed"], names["failed"], message, output)


def belongs(test: str, argument: str) -> bool:
    """Whether a test is among those that an argument of pytest selects."""
    return test == argument or test.startswith((f"{argument}::", f"{argument}["))


def control(
    folder: Path, faults: Sequence[Fault], limit: float, say: Callable[[str], None] = print
) -> dict[str, str]:
    """Run all named tests without a fault: in one run, or each alone if pytest cannot run all together.

    Returns:
        For each argument of each fault why it proves nothing, empty where all is well.
    """
    arguments = list(dict.fromkeys(t for f in faults for t in f.tests))
    run = run_pytest(folder, arguments, limit)
    if run.status not in (0, 1) and len(arguments) > 1:
        # one that does not exist keeps pytest from running any of them
        say(f"control: pytest ended with status {run.status}, so each runs alone\n{run.output}")
        return {a: why for n in arguments for a, why in control(folder, [only(n)], limit, say).items()}
    out = {}
    for argument in arguments:
        failed = [t for t in run.failed if belongs(t, argument)]
        if failed:
            out[argument] = f"{failed[0]} fails without the fault\n{run.output}"
        elif not any(belongs(t, argument) for t in run.passed):
            out[argument] = f"no test of {argument} runs, exit status {run.status}\n{run.output}"
        else:
            out[argument] = ""
    return out


def only(test: str) -> Fault:
    """A fault that is none, to run one test with."""
    return Fault(test, "", "", "", "", (test,))


def try_fault(fault: Fault, root: Path, folder: Path, limit: float, wide: Sequence[str]) -> Result:
    """Apply a fault in the copy, run its tests, and put the file back.

    Args:
        fault: the fault.
        root: the checkout that the copy was made from.
        folder: the copy.
        limit: seconds that its tests may take.
        wide: arguments of pytest that select further tests, run if it survives; may be empty.
    """
    path = folder / fault.file
    try:
        path.write_text(mutated(fault, root), encoding="utf-8")
        _forget(path)
        run = run_pytest(folder, ["-x", *fault.tests], limit)
        result = judge(run, limit)
        if result.outcome == NOTICED and (name := missing_name(run.message, fault)):
            result = Result("", "anchor", run.seconds, why=f"  its `after` uses {name!r}, which is not there")
        if result.outcome == "survived" and wide:
            further = run_pytest(folder, ["-x", *wide], 20 * limit)
            found = (
                f"noticed by {further.failed[0]}: name that test" if further.failed else "not noticed either"
            )
            result.why += f"  {shlex.join(wide)}: {found}"
    except FaultError as error:
        result = Result("", "anchor", why=f"  {error}")
    finally:
        if path.is_file():
            shutil.copy2(root / fault.file, path)
            _forget(path)
    result.name, result.fault = fault.name, json.loads(json.dumps(asdict(fault)))
    return result


def judge(run: Run, limit: float) -> Result:
    """What a run with a fault applied says of it."""
    if run.status is None:
        return Result("", "timeout", run.seconds, why=f"  its tests took more than {limit:g} s\n{run.output}")
    if run.status == 1 and run.failed:
        return Result("", NOTICED, run.seconds, run.failed[0], run.message)
    if run.status == 0 and run.passed:
        return Result("", "survived", run.seconds, why="  the tests that it names pass with it")
    return Result("", "broken", run.seconds, why=f"  pytest ended with status {run.status}\n{run.output}")


def missing_name(message: str, fault: Fault) -> str:
    """The name in a fault's `after` that a test failed for want of; empty if it failed for another reason.

    Such a fault proves nothing: the code has lost that name since the fault was written.
    """
    found = MISSING_NAME.search(message)
    name = next(filter(None, found.groups()), "") if found else ""
    used = [set(WORD.findall(text)) for text in (fault.before, fault.after)]
    return name if name in used[1] - used[0] else ""


def _forget(path: Path) -> None:
    # Python would take compiled code for that of a file of the same size, written in the same second.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


# -- the whole run -----------------------------------------------------------------------------------


@dataclass
class Record:
    """What is known so far, kept in a file after each fault.

    Attributes:
        path: the file; None to keep nothing.
        digest: of the checkout.
        control: as `control` gives it.
        results: those of faults by name.
    """

    path: Path | None
    digest: str
    control: dict[str, str] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)

    def load(self, path: Path) -> None:
        """Take over what an earlier run found out about the same checkout."""
        if not path.is_file():
            return
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["digest"] == self.digest:
            self.control = {t: why for t, why in known["control"].items() if not why}
            self.results = {r["name"]: Result(**r) for r in known["results"] if r["outcome"] == NOTICED}
        else:
            print(f"{path} is of another state of the repository: all is run anew")

    def has(self, fault: Fault) -> bool:
        """Whether this very fault was noticed before."""
        known = self.results.get(fault.name)
        return known is not None and known.fault == json.loads(json.dumps(asdict(fault)))

    def save(self) -> None:
        """Write the file."""
        if self.path is not None:
            known = {
                "digest": self.digest,
                "commit": _git("rev-parse", "HEAD"),
                "control": self.control,
                "results": [asdict(r) for r in self.results.values()],
            }
            self.path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def mutate(
    root: Path,
    faults: Sequence[Fault],
    record: Record,
    jobs: int = 1,
    limit: float = 180.0,
    wide: Sequence[str] = (),
    package: str = "megatron_flex",
    say: Callable[[str], None] = print,
) -> list[Result]:
    """Try faults, and tell of each as soon as it is known.

    Args:
        root: the checkout.
        faults: which.
        record: what is known, and where it is kept.
        jobs: how many at a time, each in a copy of its own.
        limit: seconds that the tests of one fault may take.
        wide: as for `try_fault`.
        package: what must be imported from the copy.
        say: called with each line.

    Returns:
        A result for each fault, in order.

    Raises:
        FaultError: the package is imported from elsewhere.
    """
    left = [f for f in faults if not record.has(f)]
    with tempfile.TemporaryDirectory(prefix="flex-mutate-") as scratch:
        folders: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            folder = Path(scratch) / str(number)
            copy_repository(root, folder)
            folders.put(folder)
        check_import(folder, package)
        unknown = [
            only(t) for t in dict.fromkeys(t for f in left for t in f.tests) if t not in record.control
        ]
        if unknown:
            say(f"control: the tests of {len(left)} faults, without a fault")
            start = time.monotonic()
            record.control |= control(folder, unknown, limit * len(unknown), say)
            say(f"control: {len(unknown)} nodes in {time.monotonic() - start:.0f} s")
            record.save()

        def attempt(fault: Fault) -> Result:
            reasons = [why for t in fault.tests if (why := record.control[t])]
            if reasons:
                return Result(fault.name, "broken", why=f"  {reasons[0]}", fault=asdict(fault))
            folder = folders.get()
            try:
                return try_fault(fault, root, folder, limit, wide)
            finally:
                folders.put(folder)

        with ThreadPoolExecutor(jobs) as pool:
            pending = [pool.submit(attempt, f) for f in left]
            try:
                for done in as_completed(pending):
                    result = done.result()
                    record.results[result.name] = result
                    record.save()
                    say(result.line())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                processes.end()
                raise
    return [record.results[f.name] for f in faults]


def summary(results: Sequence[Result]) -> str:
    """How many were noticed, which were not, and which took longest."""
    missed = [r for r in results if r.outcome != NOTICED]
    slow = sorted(results, key=lambda r: -r.seconds)[:5]
    count, seconds = len(results), sum(r.seconds for r in results)
    lines = [f"{count - len(missed)} of {count} faults noticed, {seconds:.0f} s"]
    lines += [f"  {r.outcome}: {r.name}" for r in missed]
    return "\n".join([*lines, "slowest: " + ", ".join(f"{r.name} {r.seconds:.0f} s" for r in slow)])


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip()


def flags(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/dev/mutate",
        description="Apply each fault of tests/faults.toml by itself, in a copy of the repository, and check "
        "that its tests notice it. Ends with 0 only if all are noticed.",
    )
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="faults by name or glob, such as 'dump-*'")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1, help="how many at a time (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results in this file")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="skip what this file has as noticed, and go on in it"
    )
    parser.add_argument(
        "--limit", type=float, default=180.0, metavar="S", help="seconds for one fault (default 180)"
    )
    parser.add_argument(
        "--wide",
        nargs="?",
        const="-m versions",
        default="",
        metavar="SELECTION",
        help="arguments of pytest, run if a fault's own tests do not notice it (default: '-m versions')",
    )
    return parser.parse_args(words)


def chosen(faults: Sequence[Fault], patterns: Sequence[str]) -> list[Fault]:
    """The faults of these names or globs; all if there are none.

    Raises:
        FaultError: one of them means no fault.
    """
    for pattern in patterns:
        if not fnmatch.filter([f.name for f in faults], pattern):
            raise FaultError(f"--only {pattern}: no fault has such a name; --list prints all")
    return [f for f in faults if not patterns or any(fnmatch.fnmatch(f.name, p) for p in patterns)]


def main() -> int:
    """Run the command; its exit status."""
    args = flags()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # in good order: tests are ended, copies removed
    try:
        faults = chosen(read_faults(ROOT / FAULTS), args.only or ())
        if args.list:
            for fault in faults:
                print(f"{fault.name}\n  {fault.fault}\n  {fault.file}; {', '.join(fault.tests)}")
            return 0
        record = Record(args.json or args.resume, digest(ROOT))
        if args.resume:
            record.load(args.resume)
        results = mutate(ROOT, faults, record, args.jobs, args.limit, shlex.split(args.wide))
    except FaultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(results))
    return 0 if all(r.outcome == NOTICED for r in results) else 1


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
