"""Checks of the service around the model: readiness, versions, keys, metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from ddtree_appliance.smoke.client import Answer, Credential, ServiceClient, pick
from ddtree_appliance.smoke.context import PROMPTS, SmokeContext, native_request
from ddtree_appliance.smoke.outcome import CheckFailed, Outcome, passed, reported, skipped
from ddtree_appliance.smoke.target import spellings_of

VERSION_FIELDS = ("version", "sglang_version", "patchset_sha256", "model")
HEARTBEAT = "sglang:scheduler_heartbeat_timestamp_seconds"
VERIFY_STEPS = "sglang:spec_verify_steps_total"
SIDECAR_READY = "ddtree_engine_ready"
# The scheduler publishes at most twice a second, and an idle one that sleeps wakes up once a second.
SCRAPE_INTERVAL_S = 1.2
SCRAPE_AGAIN_S = 0.4
METRICS_PATIENCE_S = 6.0

Series = dict[str, float]


def engine_ready(context: SmokeContext) -> Outcome:
    """GET /health is 200 without a key. Stops the run if not: nothing else can be trusted then."""
    try:
        context.engine.get("/health", Credential.NONE).expect()
    except CheckFailed as failure:
        hint = failure.hint
        if "answered 401" in failure.message:
            hint = "probes carry no key: what stands in front of the engine must let /health through"
        raise CheckFailed(failure.message, hint, stops_run=True) from None
    return passed("GET /health answered 200")


def auth_enforced(context: SmokeContext) -> Outcome:
    """With a key: 401 without it and with a wrong one. Stops the run if the service refuses us altogether."""
    engine, prompt = context.engine, native_request(PROMPTS[0], 1)
    ours = engine.post("/generate", prompt)
    if context.target.api_key is None:
        if ours.status in (401, 403):
            raise CheckFailed("the service wants a key and none was given", "give the API key", stops_run=True)
        ours.expect()
        return reported("no key: the service is open")
    if ours.status in (401, 403):
        raise CheckFailed("the service refuses the given key", "is it this instance's API key?", stops_run=True)
    ours.expect()

    let_in = []
    for credential in (Credential.NONE, Credential.WRONG):
        answers = [engine.post("/generate", prompt, credential)]
        answers += [engine.get(path, credential) for path in ("/v1/models", "/server_info")]
        let_in += [f"{a.asked} with {credential.value} ({a.status})" for a in answers if a.status != 401]
    if let_in:
        raise CheckFailed(
            f"not answered with 401: {', '.join(let_in)}", "start the engine with its API key; see its --config file"
        )
    scrape = engine.get("/metrics", Credential.NONE)
    if scrape.status in (401, 403):
        raise CheckFailed("GET /metrics wants a key", "Prometheus scrapes without one; let /metrics through")
    return passed("401 without the key and with a wrong one; /health and /metrics are open")


def sidecar_ready(context: SmokeContext) -> Outcome:
    """GET /readyz is 200; a degraded service is ready, and shown."""
    if context.sidecar is None:
        return skipped("no URL of the health sidecar was given")
    ready = context.sidecar.get("/readyz").expect()
    state = pick(ready.json(), str, "state", where=ready.asked)
    if state == "degraded":
        return reported(f"degraded: {ready.json().get('reason')}")
    return passed(state)


def versions(context: SmokeContext) -> Outcome:
    """The engine runs DDTREE, and the sidecar's account of it agrees."""
    where = "GET /server_info"
    algorithm = context.server_info.get("speculative_algorithm")
    if algorithm != "DDTREE":
        raise CheckFailed(f"the engine's algorithm is {algorithm}, not DDTREE", "--speculative-algorithm DDTREE")
    budget = pick(context.server_info, int, "speculative_ddtree_budget", where=where)
    engine = f"sglang {pick(context.server_info, str, 'version', where=where)}, DDTREE, {budget} nodes"
    if context.sidecar is None:
        return passed(f"{engine}; no sidecar was asked")

    answer = context.sidecar.get("/version").expect()
    told = {name: pick(answer.json(), str, name, where=answer.asked) for name in VERSION_FIELDS}
    if not all(told.values()):
        empty = ", ".join(name for name, value in told.items() if not value)
        raise CheckFailed(f"the sidecar's /version leaves empty: {empty}", "is it the same image as the engine?")
    if answer.json().get("patchset_verified") is False:
        raise CheckFailed(
            f"the sidecar's SGLang ({told['sglang_version']}) is not the one that was built",
            "what does ddtree-appliance patches verify say in the image?",
        )
    sidecar_budget = pick(answer.json(), int, "budget", where=answer.asked)
    if sidecar_budget != budget:
        raise CheckFailed(
            f"the engine's node budget is {budget}, the sidecar's {sidecar_budget}",
            "one of them was started with another configuration; restart both",
        )
    image = answer.json().get("image") or "unknown"
    digest = told["patchset_sha256"][:12]
    return passed(f"{engine}; appliance {told['version']}, patches {digest}, image {image}, model {told['model']}")


def keys_absent(context: SmokeContext) -> Outcome:
    """No given key stands in /server_info (asked with the key), in /metrics, or in the sidecar's answers."""
    secrets = list(context.target.secrets())
    if not secrets:
        return skipped("no key was given, so there is none to look for")
    answers = [("engine", context.engine.get("/server_info").expect()), ("engine", _get_metrics(context.engine))]
    if context.sidecar is not None:
        answers += [("sidecar", context.sidecar.get("/version").expect()), ("sidecar", _get_metrics(context.sidecar))]
    leaks = [
        f"the {name} stands in the {service}'s answer to {answer.asked}"
        for service, answer in answers
        for name, key in secrets
        if any(spelling in answer.text for spelling in spellings_of(key))
    ]
    if leaks:
        raise CheckFailed(
            "; ".join(leaks), "change the key, and run the patched SGLang (ddtree-appliance patches verify)"
        )
    return passed(f"{' and '.join(name for name, _ in secrets)} not in {len(answers)} answers")


def metrics(context: SmokeContext) -> Outcome:
    """The scheduler's heartbeat moves, our own verify steps are counted, the sidecar calls the engine ready."""
    before = scrape(context.engine)
    if not before.get(HEARTBEAT):
        raise CheckFailed(f"/metrics has no {HEARTBEAT}", "is it the patched SGLang?")
    own_steps = context.generate(PROMPTS[0], 16).verify_steps
    end = context.clock() + METRICS_PATIENCE_S
    context.sleep(SCRAPE_INTERVAL_S)
    # Counters are published with the heartbeat, so the last steps of our requests may be a scrape late.
    while problems := _unmoved(before, scrape(context.engine), own_steps):
        if context.clock() >= end:
            raise CheckFailed("; ".join(problems), "the scheduler does not turn, or metrics are not collected")
        context.sleep(SCRAPE_AGAIN_S)
    counted = f"heartbeat moves, verify steps are counted ({own_steps} of one request)"
    if context.sidecar is None:
        return passed(f"{counted}; no sidecar was asked")
    ready = scrape(context.sidecar).get(SIDECAR_READY, {})
    if list(ready.values()) != [1.0]:
        shown = ", ".join(f"{value:g}" for value in ready.values()) or "missing"
        raise CheckFailed(f"the sidecar's {SIDECAR_READY} is {shown}, not 1", "what does its /readyz say?")
    return passed(f"{counted}; {SIDECAR_READY} is 1")


def _unmoved(before: dict[str, Series], after: dict[str, Series], own_steps: int) -> list[str]:
    # Every rank's: one stuck rank stops them all.
    frozen = [labels for labels, at in before[HEARTBEAT].items() if after.get(HEARTBEAT, {}).get(labels, 0) <= at]
    problems = [f"{HEARTBEAT} does not move: {labels or 'no labels'}" for labels in frozen]
    if VERIFY_STEPS not in after:
        return [*problems, f"/metrics has no {VERIFY_STEPS}"]
    counted = sum(after[VERIFY_STEPS].values()) - sum(before.get(VERIFY_STEPS, {}).values())
    if counted < max(own_steps, 1):
        problems.append(f"{VERIFY_STEPS} rose by {counted:g} while a request took {own_steps} steps")
    return problems


def _get_metrics(service: ServiceClient) -> Answer:
    """/metrics as Prometheus asks for it, without a key."""
    answer = service.get("/metrics", Credential.NONE)
    if answer.status == 404:
        raise CheckFailed("GET /metrics answered 404", "start the engine with --enable-metrics")
    return answer.expect()


def scrape(service: ServiceClient) -> dict[str, Series]:
    """Values by labels, by sample name. Raises CheckFailed if that is not what /metrics answers."""
    answer = _get_metrics(service)
    series: dict[str, Series] = {}
    try:
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                series.setdefault(sample.name, {})[labels] = sample.value
    except ValueError as error:
        raise CheckFailed(f"{answer.asked}: not in Prometheus' text format: {error}") from None
    return series
