# SPDX-License-Identifier: Apache-2.0
"""`examples/applications/utio/utio_calibrate.py` against the same figures taken the plain way."""

import math
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from calibrations import (
    CONTEXT,
    CUTOFFS,
    FAMILIES,
    HIDDEN,
    LAYERS,
    arguments,
    folder,  # noqa: F401
)
from safetensors import safe_open
from scipy.stats import norm, spearmanr
from tiny_models import CONFIGS, SHORT_TEXTS, make_tokenizer
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM, LlamaConfig

PROBE = ["weight_1", "bias_1", "weight_2", "bias_2"]
TRANSLATOR = ["weight", "bias", "weight_1", "bias_1", "weight_2"]
FLOAT32_TOLERANCE = 5e-4
"""Of a divergence in nats, from float32 logits of up to about ±40."""


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    """Of several lengths, the shortest there is among them."""
    ids = make_tokenizer()(Path(__file__).read_text())["input_ids"]
    lengths = [CONTEXT, 3, 17, CONTEXT, 40]
    return [ids[100 * i : 100 * i + length] for i, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def fitted(folder, tmp_path_factory):
    """A run of the program on two cutoffs: its file, its report, its arguments."""
    import utio_calibrate

    output = tmp_path_factory.mktemp("fitted") / "probe.safetensors"
    argv = arguments(folder("deep_llama"), output, "--tokens", "3000")
    argv += ["--holdout", "0.3", "--no-translators"]
    return output, utio_calibrate.main(argv), utio_calibrate.parse_args(argv)


@pytest.fixture(scope="module", params=["deep_llama", "deep_opt_post"])
def translated(request, folder, tmp_path_factory):
    """As `fitted`, with translators; and the model's folder."""
    import utio_calibrate

    output = tmp_path_factory.mktemp("translated") / "probe.safetensors"
    argv = arguments(folder(request.param), output, "--tokens", "3000")
    argv += ["--holdout", "0.3"]
    report, args = utio_calibrate.main(argv), utio_calibrate.parse_args(argv)
    return output, report, args, folder(request.param)


def plain(folder: Path, windows, cutoff: int) -> SimpleNamespace:
    """The same numbers, window by window: the exit is a model of fewer layers.

    Its state is what its last layer returns, its logits are its own forward's.
    """
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    short = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    decoder = getattr(short.model, "decoder", short.model)
    decoder.layers = decoder.layers[:cutoff]
    states = []
    decoder.layers[-1].register_forward_hook(lambda m, i, out: states.append(out[0]))
    columns = {}

    def keep(**values) -> None:
        for name, value in values.items():
            columns.setdefault(name, []).append(value.double().numpy())

    for window in windows:
        ids = torch.tensor([window])
        with torch.no_grad():
            p = full(ids).logits[0].double().log_softmax(-1)
            q = short(ids).logits[0].double().log_softmax(-1)
        state = states.pop()[1:-1].double()
        following = ids[0, 2:]
        here = slice(1, -1)
        keep(
            features=state / (state.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt(),
            kl=kl_div(q, p, reduction="none", log_target=True).sum(-1)[here],
            exit_entropy=torch.distributions.Categorical(logits=q[here]).entropy(),
            exit_nll=cross_entropy(q[here], following, reduction="none"),
            agrees=p.argmax(-1)[here] == q.argmax(-1)[here],
            full_nll=cross_entropy(p[here], following, reduction="none"),
            lagged_entropy=torch.distributions.Categorical(logits=p[:-2]).entropy(),
        )
    return SimpleNamespace(**{name: np.concatenate(c) for name, c in columns.items()})


def collect(folder: Path, windows, cutoffs=CUTOFFS, batch_size=3) -> list:
    from utio_states import Exits

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return list(Exits(model, cutoffs).rows(windows, batch_size))


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_divergences_are_those_of_a_model_cut_short(family, folder, windows):
    rows = collect(folder(family), windows)
    assert [len(row.full_nll) for row in rows] == [len(w) - 2 for w in windows]
    for i, cutoff in enumerate(CUTOFFS):
        truth = plain(folder(family), windows, cutoff)
        features = torch.cat([row.features[i] for row in rows])
        assert features.dtype == torch.float32
        np.testing.assert_allclose(features, truth.features, atol=2e-5)
        for name in ("kl", "exit_entropy", "exit_nll"):
            found = np.concatenate([getattr(row, name)[i] for row in rows])
            np.testing.assert_allclose(
                found, getattr(truth, name), atol=FLOAT32_TOLERANCE, err_msg=name
            )
        for name in ("full_nll", "lagged_entropy"):
            found = np.concatenate([getattr(row, name) for row in rows])
            np.testing.assert_allclose(
                found, getattr(truth, name), atol=FLOAT32_TOLERANCE, err_msg=name
            )
        agrees = np.concatenate([row.agrees[i] for row in rows])
        assert (agrees == truth.agrees).all()
        # The random exits of this one never choose as full depth does.
        assert 0 < agrees.sum() < len(agrees) or family == "deep_opt_post"
        assert truth.kl.mean() > 0.01  # else the comparison would say nothing


@pytest.mark.parametrize("at_once", [1, 5000])
def test_blocks_of_logits_change_nothing(at_once, folder, windows, monkeypatch):
    whole = collect(folder("deep_llama"), windows)
    monkeypatch.setattr("utio_states.LOGITS_AT_ONCE", at_once)
    for a, b in zip(whole, collect(folder("deep_llama"), windows, batch_size=1)):
        for name, x, y in zip(a._fields, a, b):
            np.testing.assert_allclose(x, y, atol=FLOAT32_TOLERANCE, err_msg=name)


def test_the_probes_in_the_file_predict_what_is_reported(fitted, folder):
    """Their formula in NumPy, on Transformers' states of the held-out part."""
    from utio_texts import cut, split

    output, report, args = fitted
    texts = [path.read_text() for path in SHORT_TEXTS]
    tokens = cut(make_tokenizer(), texts, CONTEXT, args.tokens)
    train, test = split(tokens, args.holdout)
    with safe_open(output, "numpy") as file:
        probes = {name: file.get_tensor(f"probe_{name}") for name in PROBE}
    for i, cutoff in enumerate(CUTOFFS):
        truth = plain(folder("deep_llama"), test, cutoff)
        weight_1, bias_1, weight_2, bias_2 = (probes[name][i] for name in PROBE)
        inner = truth.features @ weight_1.T + bias_1
        found = inner * norm.cdf(inner) @ weight_2 + bias_2
        np.testing.assert_allclose(report.held_out.predicted[i], found, atol=1e-3)
        # It is the root of the divergence that they were fitted to.
        seen = plain(folder("deep_llama"), train, cutoff)
        assert len(seen.kl) + len(truth.kl) == args.tokens
        inner = seen.features @ weight_1.T + bias_1
        errors = inner * norm.cdf(inner) @ weight_2 + bias_2 - np.sqrt(seen.kl)
        assert np.square(errors).mean() < 0.8 * np.sqrt(seen.kl).var()


@pytest.mark.parametrize("size", [32, 1024])
def test_a_probe_finds_what_no_linear_one_can(size):
    """The size of a component; and, as well as least squares, a component."""
    from utio_fit import fit_probe

    rng = np.random.default_rng(0)
    x = rng.normal(size=(24_000, size)).astype(np.float16)
    direction = rng.normal(size=size) / math.sqrt(size)
    component = x.astype(np.float64) @ direction
    for target in (5 + 0.1 * np.abs(component), 3 * component - 1):
        noise = 0.1 * target.std() * rng.normal(size=len(x))
        probe = fit_probe(x[:20_000], (target + noise)[:20_000], 64, "cpu")
        with torch.no_grad():
            found = probe(torch.from_numpy(x[20_000:]).float()).squeeze(1).numpy()
        error = np.square(found - target[20_000:]).mean() / target.var()
        assert error < 0.1


def test_probes_expect_of_other_text_what_it_gives(translated):
    """Translators do better on the text that they are fitted to. Probes of that text would
    expect 0.2 to 0.4 more of the greedy drafts to be accepted, and cost 0.1 to 0.2 lower."""
    held = translated[1].held_out
    for expected, truth in zip(held.acceptance, (held.agrees, held.overlap)):
        # Of some 900 tokens it is up to 0.2 less by chance.
        more = expected.mean(1) - truth.mean(1)
        assert more.max() < 0.12 and more.min() > -0.3
    more = held.predicted.mean(1) - np.sqrt(held.kl).mean(1)
    assert more.min() > -0.07 and more.max() < 0.2


def test_translators_are_what_leavers_say(translated):
    """Their formula on Transformers' states, then its own norm and head; and they are
    better than least squares, which they begin with."""
    from utio_fit import STRENGTH
    from utio_texts import cut, split

    output, report, args, model_folder = translated
    texts = [path.read_text() for path in SHORT_TEXTS]
    tokens = cut(make_tokenizer(), texts, CONTEXT, args.tokens)
    fit, held_out = split(tokens, args.holdout)
    model = AutoModelForCausalLM.from_pretrained(model_folder).float().eval()
    decoder = getattr(model.model, "decoder", model.model)
    is_post = "opt" in model_folder.name
    tail = [decoder.project_out] if is_post else [decoder.norm]
    taken = {}
    for n in (*CUTOFFS, LAYERS):
        decoder.layers[n - 1].register_forward_hook(
            lambda m, i, out, n=n: taken.__setitem__(n, out[0])
        )

    def states(windows):
        found = {n: [] for n in (*CUTOFFS, LAYERS)}
        for window in windows:
            with torch.no_grad():
                model(torch.tensor([window]))
            for n, state in taken.items():
                unit = state[1:-1].double()
                if n < LAYERS or not is_post:
                    unit /= (unit.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
                found[n].append(unit)
        return {n: torch.cat(parts).numpy() for n, parts in found.items()}

    @torch.no_grad()
    def divergence(there, here):
        logprobs = []
        for features in (there, here):
            x = torch.from_numpy(features).float()
            for module in tail:
                x = module(x)
            logprobs.append(model.lm_head(x).double().log_softmax(-1))
        p, q = logprobs
        return kl_div(q, p, reduction="none", log_target=True).sum(-1).numpy()

    with safe_open(output, "numpy") as file:
        stacks = {name: file.get_tensor(f"translator_{name}") for name in TRANSLATOR}
    width = args.translator_width or HIDDEN
    assert {name: stack.shape[1:] for name, stack in stacks.items()} == {
        "weight": (HIDDEN, HIDDEN),
        "bias": (HIDDEN,),
        "weight_1": (width, HIDDEN),
        "bias_1": (width,),
        "weight_2": (HIDDEN, width),
    }

    def translation(x, weight, bias, weight_1, bias_1, weight_2):
        inner = x @ weight_1.T + bias_1
        return x @ weight.T + bias + inner * norm.cdf(inner) @ weight_2.T

    at_fit, later = states(fit), states(held_out)
    for i, cutoff in enumerate(CUTOFFS):
        fitted = [stacks[name][i].astype(np.float64) for name in TRANSLATOR]
        kl = divergence(later[LAYERS], translation(later[cutoff], *fitted))
        np.testing.assert_allclose(report.held_out.kl[i], kl, atol=5e-3)
        truth = plain(model_folder, held_out, cutoff)
        assert report.untranslated[i] == pytest.approx(truth.kl.mean(), rel=1e-4)

        x, y = at_fit[cutoff], at_fit[LAYERS]
        pull = math.sqrt(STRENGTH * len(x)) * np.eye(HIDDEN)
        rows = np.concatenate([x - x.mean(0), pull])
        targets = np.concatenate([y - y.mean(0), np.zeros((HIDDEN, HIDDEN))])
        linear = np.linalg.lstsq(rows, targets, rcond=None)[0]
        least_squares = (x - x.mean(0)) @ linear + y.mean(0)
        before = divergence(y, least_squares)
        after = divergence(y, translation(x, *fitted))
        # The last layer of some models does next to nothing: a linear map will do.
        # Steps in float32 end at 0.95 to 0.98 of it, by the CPU that adds.
        share = 0.99 if before.mean() > 0.01 else 1.0001
        assert after.mean() < share * before.mean()


def test_normal_equations_in_pieces_are_ridge():
    """By lstsq on a matrix with more rows that pull the weights to 0."""
    from utio_fit import NormalEquations

    rng = np.random.default_rng(0)
    x = (rng.normal(size=(500, 20)) + rng.normal(size=20)).astype(np.float32)
    y = rng.normal(size=(500, 2)) + x[:, 3:5]
    sums = NormalEquations(20, 2)
    for begin in range(0, 500, 70):
        piece = slice(begin, begin + 70)
        sums.add(torch.from_numpy(x[piece]), torch.from_numpy(y[piece]))
    x = x.astype(np.float64)
    for strength in (1e-6, 1e-2, 1.0):
        weight, intercept = sums.solve(strength)
        rows = np.concatenate([x - x.mean(0), math.sqrt(strength * 500) * np.eye(20)])
        targets = np.concatenate([y - y.mean(0), np.zeros((20, 2))])
        expected = np.linalg.lstsq(rows, targets, rcond=None)[0]
        np.testing.assert_allclose(weight, expected, atol=1e-9)
        by_hand = y.mean(0) - x.mean(0) @ expected
        np.testing.assert_allclose(intercept, by_hand, atol=1e-9)


def test_columns_that_are_sums_of_others_are_no_matter():
    from utio_fit import NormalEquations

    x = np.random.default_rng(0).normal(size=(300, 4))
    x = np.concatenate([x, x[:, :1] + x[:, 1:2], np.ones((300, 1))], 1)
    sums = NormalEquations(6, 1)
    sums.add(torch.from_numpy(x).float(), torch.from_numpy(x[:, :1] * 2 + 1))
    weight, intercept = sums.solve(1e-6)
    assert weight.isfinite().all()
    np.testing.assert_allclose(x @ weight.numpy() + intercept.numpy(),
                               x[:, :1] * 2 + 1, atol=1e-4)  # fmt: skip


def test_the_file_says_what_it_is(fitted):
    output, report, args = fitted
    with safe_open(output, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata()
    ids, embeddings = tensors.pop("token_ids"), tensors.pop("token_embeddings")
    embedded = AutoModelForCausalLM.from_pretrained(args.model).get_input_embeddings()
    assert torch.equal(embeddings, embedded.weight[ids])
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    count, width = len(CUTOFFS), args.probe_width
    expected = {}
    for name, units in (
        ("probe", width),
        ("acceptance_greedy", min(width, 64)),
        ("acceptance_sampled", min(width, 64)),
    ):
        expected |= {
            f"{name}_weight_1": (count, units, HIDDEN),
            f"{name}_bias_1": (count, units),
            f"{name}_weight_2": (count, units),
            f"{name}_bias_2": (count,),
        }
    assert {name: tuple(x.shape) for name, x in tensors.items()} == expected
    assert metadata == {
        "format": "utio-calibration-2",
        "cutoffs": "2,5",
        "num_layers": str(LAYERS),
        "hidden_size": str(HIDDEN),
        "model_type": "llama",
        "tokens": str(args.tokens - len(report.held_out.full_nll)),
    }
    assert len(report.held_out.full_nll) >= args.holdout * args.tokens
    assert report.tokens == int(metadata["tokens"])


def test_the_figures_are_those_of_letting_the_lowest_leave(fitted):
    from utio_exits import lowest_by_step

    _, report, _ = fitted
    held = report.held_out
    for i in range(len(CUTOFFS)):
        kl = held.kl[i]
        scores = {
            "probe": held.predicted[i],
            "probe, 32 a step": held.predicted[i],
            "entropy at the exit": held.exit_entropy[i],
            "lagged entropy": held.lagged_entropy,
            "oracle": kl,
        }
        outcomes = {(o.leaving, o.policy): o for o in report.outcomes[i]}
        assert len(outcomes) == 18
        full = math.exp(held.full_nll.mean())
        for share in (0.3, 0.5, 0.7):
            count = round(share * len(kl))
            for name, score in scores.items():
                ranked = sorted(range(len(kl)), key=score.__getitem__)
                leavers = set(ranked[:count])
                if "step" in name:
                    leavers = set(lowest_by_step(score, share).tolist())
                assert len(leavers) == count
                tokens = range(len(kl))
                nll = [held.exit_nll[i, t] if t in leavers else held.full_nll[t]
                       for t in tokens]  # fmt: skip
                found = outcomes[share, name]
                rise = math.exp(np.mean(nll)) / full - 1
                agreement = np.mean(
                    [held.agrees[i, t] or t not in leavers for t in tokens]
                )
                assert found.kl == pytest.approx(sum(kl[list(leavers)]) / len(kl))
                assert found.rise == pytest.approx(rise)
                assert found.agreement == pytest.approx(agreement)
                assert found.spearman == pytest.approx(spearmanr(score, kl).statistic)
                random = outcomes[share, "random"].rise
                oracle = outcomes[share, "oracle"].rise
                if random > oracle:
                    closed = (random - rise) / (random - oracle)
                    assert found.closed == pytest.approx(closed)
            # What drawn leavers come to on average.
            rng = np.random.default_rng(0)
            drawn = np.array([rng.permutation(len(kl))[:count] for _ in range(2000)])
            by_hand = kl[drawn].sum(1) / len(kl)
            error = 4 * by_hand.std() / math.sqrt(len(by_hand))
            random = outcomes[share, "random"]
            assert random.kl == pytest.approx(by_hand.mean(), abs=error)
            assert random.closed == 0 or math.isnan(random.closed)


def test_one_exit_for_all_beside_routing_that_runs_as_many_layers(fitted):
    from utio_exits import lowest_by_step

    _, report, _ = fitted
    held, layers = report.held_out, CONFIGS["deep_llama"].num_hidden_layers
    full = math.exp(held.full_nll.mean())
    assert [way.exit_layer for way in report.exits] == CUTOFFS
    for i, way in enumerate(report.exits):
        assert way.layers == CUTOFFS[i] / layers
        rise = math.exp(held.exit_nll[i].mean()) / full - 1
        assert way.cost == pytest.approx((rise, held.agrees[i].mean()))
        found = []
        for j in range(i):
            # As many layers: CUTOFFS[i] = share * CUTOFFS[j] + (1 - share) * layers.
            share = (layers - CUTOFFS[i]) / (layers - CUTOFFS[j])
            leaves = np.isin(range(len(full_nll := held.full_nll)),
                             lowest_by_step(held.predicted[j], share))  # fmt: skip
            nll = np.where(leaves, held.exit_nll[j], full_nll)
            agrees = np.where(leaves, held.agrees[j], True)
            rise = math.exp(nll.mean()) / full - 1
            found.append((rise, agrees.mean(), CUTOFFS[j], share))
        if not found:
            assert way.routed is None
            continue
        rise, agreement, earlier, share = min(found)
        assert way.routed.exit_layer == earlier
        assert way.routed.leaving == pytest.approx(share)
        assert way.routed.cost == pytest.approx((rise, agreement))


@pytest.mark.parametrize(("rises", "chosen"), [((0.2, 0.04, 0.01), 6), ((0.2, 0.3, 0.06), None)])
def test_the_fewest_layers_that_cost_little_are_proposed(rises, chosen):
    from utio_drafting import Drafting, serve_options
    from utio_exits import Cost, Exit, either, proposal, proposed

    exits = [Exit(layer, layer / 12, Cost(rise, 0.9), None)
             for layer, rise in zip((3, 6, 9), rises)]  # fmt: skip
    way, said = proposed(exits), proposal(exits, "probe.safetensors")
    drafting = Drafting(3, 2, 0.15, 0.5, 2.0, 1.4)
    drafting = serve_options(drafting, "probe.safetensors", draft_gate=True)
    both = either(exits, "probe.safetensors", drafting)
    if chosen is None:
        assert way is None and "draft" in said and both == []
        return
    assert way.exit_layer == chosen
    assert f"--utio-bucket-cutoffs {chosen} " in said and f"max_depth={chosen} " in said
    assert "--utio-calibration probe.safetensors" in said
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    options = shlex.split(both[0].partition("faster: ")[2].removesuffix(", and no max_depth"))
    parsed = parser.parse_args(options)
    assert parsed.enable_utio and parsed.utio_bucket_cutoffs == [chosen]
    assert parsed.utio_bucket_shares == [1, 0]
    assert parsed.speculative_config == {
        "method": "early_exit", "exit_layer": 3, "num_speculative_tokens": 2,
        "min_acceptance": 0.15, "calibration": "probe.safetensors", "draft_gate": True,
    }  # fmt: skip


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_each_step_lets_its_share_go(share):
    from utio_exits import STEP, lowest_by_step

    scores = np.random.default_rng(1).permutation(10 * STEP + 7).astype(float)
    chosen = set(lowest_by_step(scores, share).tolist())
    assert len(chosen) == round(share * len(scores))
    order = np.random.default_rng(0).permutation(len(scores))
    for begin in range(0, len(order), STEP):
        step = order[begin : begin + STEP].tolist()
        inside = [scores[i] for i in step if i in chosen]
        assert abs(len(inside) - share * len(step)) <= 1
        assert max(inside) < min(scores[i] for i in step if i not in chosen)


def test_a_cost_that_is_in_the_state_is_found(tmp_path):
    """Only the last layer does anything, and only for tokens whose embedding is
    positive in one direction."""
    import utio_calibrate

    options = CONFIGS["deep_llama"].to_dict() | {"tie_word_embeddings": False}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**options)).float()
    size = 40.0
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 0] = torch.where(torch.rand(len(embeddings)) < 0.5, 1.0, -1.0)
        mlp = model.model.layers[-1].mlp
        mlp.gate_proj.weight.zero_()
        mlp.gate_proj.weight[:, 0] = size  # silu of it is 0 or large
        mlp.down_proj.weight.normal_(std=0.02)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    report = utio_calibrate.main(
        arguments(
            tmp_path / "model", tmp_path / "probe.safetensors", "--no-translators"
        )
    )
    costs_nothing = (report.held_out.kl[0] < 1e-4).mean()
    assert 0.2 < costs_nothing < 0.8  # the plant is there
    for outcomes in report.outcomes:
        for outcome in outcomes:
            if outcome.policy == "probe":
                assert outcome.spearman > 0.7
                if outcome.leaving < costs_nothing:
                    assert outcome.kl < 1e-4
                    assert outcome.agreement > 0.999


def test_what_is_printed(fitted, capsys):
    from utio_calibrate import show

    _, report, args = fitted
    show(args, report)
    printed = capsys.readouterr().out
    assert "eacher forcing with full-depth attention" in printed
    lines = printed.splitlines()
    assert max(map(len, lines[4:-3])) <= 88 and "…" not in printed
    assert all(str(args.output) in line or "No exit" in line for line in lines[-3:])
    assert '"method": "early_exit"' in lines[-1]
    words = ("random", "probe", "probe, 32 a step", "entropy at the exit")
    for word in (*words, "lagged entropy", "oracle"):
        rows = [line for line in lines[4:] if f" {word}  " in line]
        assert len(rows) == 3 * len(CUTOFFS)
    for cutoff in CUTOFFS:
        assert f"Leaving after {cutoff} layers" in printed
