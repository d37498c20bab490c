"""Real servers for the rehearsal tests, started once per kind and shared; a module asks for all it needs at once."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ddtree_appliance.rehearsal.prompts import heldout_prompts
from ddtree_appliance.rehearsal.server import STAND_INS, RehearsalServer

SABOTAGE = Path(__file__).parent / "sabotage"
NEW_TOKENS = 64

PROCESSORS = "--enable-custom-logit-processor"
SHARED_FLAGS = {
    # The reference: with overlap SGLang's penalties lag one token, and its other backends know no seed.
    None: ("--sampling-backend", "seeded", "--disable-overlap-schedule", PROCESSORS),
    "DFLASH": (),
    "DDTREE": (PROCESSORS,),
}


@dataclass(frozen=True)
class Kind:
    """One way to start a server. algorithm: None, "DFLASH" or "DDTREE"."""

    algorithm: str | None = None
    budget: int | None = None
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def arguments(self) -> list[str]:
        budget = [] if self.budget is None else ["--speculative-ddtree-budget", str(self.budget)]
        return [*budget, *SHARED_FLAGS[self.algorithm], *self.flags]


PLAIN = Kind()
CHAIN = Kind("DFLASH")


def tree(budget: int, *flags: str) -> Kind:
    return Kind("DDTREE", budget, flags)


def sabotaged(fault: str, budget: int) -> Kind:
    path = os.pathsep.join([str(STAND_INS), str(SABOTAGE)])
    return Kind("DDTREE", budget, environment=(("PYTHONPATH", path), ("DDTREE_SABOTAGE", fault)))


@dataclass
class ServerPool:
    """Starts servers side by side, hands them out, and stops what a module no longer needs."""

    folder: Path
    running: dict[Kind, RehearsalServer] = field(default_factory=dict)
    started: int = 0

    def start(self, kinds: Sequence[Kind], at_once: int = 3) -> None:
        """Bring up every kind that is not running yet; more than `at_once` together only wait for each other."""
        missing = [kind for kind in dict.fromkeys(kinds) if kind not in self.running]
        for first in range(0, len(missing), at_once):
            batch = missing[first : first + at_once]
            for kind in batch:
                self.started += 1
                log = self.folder / f"server-{self.started}-{kind.algorithm}-{kind.budget}.log"
                server = RehearsalServer(kind.algorithm, log, kind.arguments, dict(kind.environment))
                self.running[kind] = server
                server.spawn()
            for kind in batch:
                self.running[kind].wait_ready()

    def __getitem__(self, kind: Kind) -> RehearsalServer:
        self.start([kind])
        return self.running[kind]

    def stop_all_but(self, kept: Sequence[Kind]) -> None:
        for kind in [kind for kind in self.running if kind not in kept]:
            server = self.running.pop(kind)
            server.stop()


@pytest.fixture(scope="session")
def all_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pytest.importorskip("sglang", reason="needs the rehearsal environment (scripts/environment --dev)")
    servers = ServerPool(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop_all_but([])


@pytest.fixture(scope="module")
def pool(all_servers: ServerPool) -> Iterator[ServerPool]:
    """The module's servers end with it, all but the reference: 2 GB each, and another worker has its own."""
    yield all_servers
    all_servers.stop_all_but([PLAIN])


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """24 held-out documents' beginnings, 96 tokens each."""
    return heldout_prompts(24, 96)


@pytest.fixture(scope="session")
def plain_tokens(all_servers: ServerPool, prompts: list[list[int]]) -> list[list[int]]:
    """What the patched server without speculation writes, greedy, 64 tokens per prompt."""
    answers = [all_servers[PLAIN].generate(prompt, NEW_TOKENS) for prompt in prompts]
    return [answer["output_ids"] for answer in answers]
