"""The CPU runtime under the installed megatron-core: a tiny model trains, and Megatron is left as it was.

Code runs in fresh interpreters: what Megatron binds while it is imported is the point.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.messages import assert_names

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.versions,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]

MODEL = dedent("""
    import sys, tempfile, types
    import torch, torch.distributed as dist
    from megatron_flex import cpu

    def start():
        from megatron.core import parallel_state
        store = "file://" + tempfile.mktemp()
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()

    def seed(number):
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        torch.manual_seed(number)
        model_parallel_cuda_manual_seed(number)

    def model(**wanted):
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig
        config = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64,
            gated_linear_unit=True, activation_func=torch.nn.functional.silu, normalization="RMSNorm",
            add_bias_linear=False, hidden_dropout=0.1, attention_dropout=0.1, bias_dropout_fusion=False,
            masked_softmax_fusion=False, apply_rope_fusion=False, gradient_accumulation_fusion=False,
            bias_activation_fusion=False, **wanted)
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        seed(1)
        return GPTModel(config, spec, vocab_size=64, max_sequence_length=16, position_embedding_type="rope")

    def step(gpt):
        gpt.cuda()
        seed(2)
        tokens = torch.randint(0, 64, (2, 16), device="cuda")
        positions = torch.arange(16, device="cuda").expand(2, 16)
        loss = gpt(tokens, positions, None, labels=tokens).mean()
        loss.backward()
        assert loss.isfinite()
        grads = [p.grad.clone() for p in gpt.parameters()]
        assert all(g.isfinite().all() and g.any() for g in grads)
        gpt.zero_grad()
        return loss.detach(), grads

    def same(one, other):
        return all(torch.equal(a, b) for a, b in zip([one[0], *one[1]], [other[0], *other[1]], strict=True))

    def everything():
        inside = [m for n, m in sys.modules.items()
                  if n.partition(".")[0] == "megatron" and isinstance(m, types.ModuleType)]
        owners = inside + [v for m in inside for v in vars(m).values()
                           if isinstance(v, type) and v.__module__.startswith("megatron.")]
        return {(str(o), key): value for o in owners for key, value in vars(o).items()
                if not isinstance(value, types.ModuleType) and not key.startswith("_CUDA_RNG")}

    def ours(seen):
        return [at for at, v in seen.items() if str(getattr(v, "__module__", "")).startswith("megatron_flex")]
""")


def run(code: str) -> str:
    """The last line that `code` printed, in an interpreter of its own, after the definitions above."""
    return run_lines(code)[-1]


def run_lines(code: str) -> list[str]:
    """All lines."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    environment.pop("TORCH_COMPILE_DISABLE", None)  # the runtime has to see to it
    done = subprocess.run(
        [sys.executable, "-c", MODEL + dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def trained() -> list[str]:
    """The norms of a tiny model's gradients, and that it trained."""
    return run_lines("""
        cpu.enable()
        start()
        plain = step(model())
        norms = [float(t.norm()) for t in plain[1]]
        full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
        assert same(plain, step(model(**full)))
        assert same(plain, step(model(recompute_granularity="selective")))
        again = model()
        first = step(again)
        assert same(plain, first), "the same seeds, the same model"
        print(norms)
        print("trained")
    """)[-2:]


def test_a_tiny_model_trains_and_recomputation_replays_dropout(trained: list[str]):
    assert trained[1] == "trained"


def test_enabling_late_gives_the_same_and_leaves_megatron_as_it_was(trained: list[str]):
    late = run("""
        import megatron.core.models.gpt.gpt_layer_specs, numpy
        from megatron.core.transformer.moe import token_dispatcher
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
        import torch._dynamo
        before = everything()
        assert ours(before) == []
        cpu.enable()
        assert ours(everything()) != []
        start()
        late = step(model())
        config = model(sequence_parallel=True, tensor_model_parallel_size=2).config
        assert WrappedTorchNorm(config=config, hidden_size=8).weight.sequence_parallel
        moved = token_dispatcher.maybe_move_tensor_to_cpu(torch.ones(2), as_numpy=True)
        assert isinstance(moved, numpy.ndarray), "a name bound by import before"
        cpu.disable()
        after = everything()
        assert ours(after) == [], ours(after)
        # Megatron keeps state of its own (groups, caches) in module variables; code must be back.
        moved = [at for at, v in before.items() if callable(v) and after.get(at) is not v]
        assert moved == [], moved
        with cpu.runtime():
            assert same(late, step(model()))
        print([float(t.norm()) for t in late[1]])
    """)
    assert trained[0] == late


def test_what_is_imported_meanwhile_is_put_right():
    said = run("""
        cpu.enable()
        start()
        step(model())
        import megatron.core.transformer.moe.token_dispatcher as dispatcher, numpy
        assert isinstance(dispatcher.maybe_move_tensor_to_cpu(torch.ones(2), as_numpy=True), numpy.ndarray)
        assert ours(everything()) != []
        cpu.disable()
        assert ours(everything()) == [], ours(everything())
        import megatron.core.tensor_parallel.random as random
        assert random._lazy_call is torch.cuda._lazy_call
        assert "megatron_flex" not in str(vars(random).get("__loader__"))
        print("put right")
    """)
    assert said == "put right"


@pytest.fixture(scope="module")
def enabled() -> list[str]:
    """What an interpreter says in which the runtime was there before Megatron: a line for each test."""
    return run_lines("""
        cpu.enable()
        start()
        from megatron.core.transformer import TransformerConfig
        try:
            from megatron.core.extensions import transformer_engine as te
        except ImportError:
            print("this megatron-core does not pretend")
        else:
            if te.HAVE_TE:
                print("Transformer Engine is installed")
            else:
                assert not isinstance(torch.nn.Linear(1, 1), (te.TELinear, te.TEColumnParallelLinear))
                try:
                    te.TELinear(1, 1)
                except ValueError as error:
                    print(error)
        try:
            from megatron.core.models.hybrid import hybrid_block
        except ImportError:
            print("no hybrid models")
        else:
            config = TransformerConfig(
                num_layers=1, hidden_size=8, num_attention_heads=2, normalization="RMSNorm")
            print(type(hybrid_block.TENorm(config, hidden_size=8, eps=1e-5)).__name__)
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
        def norm(kind, **wanted):
            config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, normalization=kind,
                                       tensor_model_parallel_size=2, **wanted)
            return WrappedTorchNorm(config=config, hidden_size=8, eps=1e-5)
        for kind, plain in (("LayerNorm", torch.nn.LayerNorm), ("RMSNorm", torch.nn.RMSNorm)):
            x = torch.randn(3, 8)
            assert type(norm(kind)) is plain, "where Megatron's own can do it, it does"
            parallel = norm(kind, sequence_parallel=True)
            assert all(p.sequence_parallel for p in parallel.parameters())
            assert torch.equal(parallel(x), plain(8, eps=1e-5)(x))
        cpu.disable()
        try:
            norm("RMSNorm", sequence_parallel=True)
        except AssertionError:
            print("refused again")
    """)[-3:]


def test_transformer_engine_is_absent_and_says_so(enabled: list[str]):
    said = enabled[0]
    if "TELinear" not in said:
        pytest.skip(said)
    assert_names(said, "TELinear", "Transformer Engine", "GPU")


def test_hybrid_models_build_their_last_norm(enabled: list[str]):
    said = enabled[1]
    if said == "no hybrid models":
        pytest.skip(said)
    assert said == "FlexRMSNorm"


def test_norms_run_under_sequence_parallel(enabled: list[str]):
    assert enabled[2] == "refused again"
