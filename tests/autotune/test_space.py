"""Config spaces: configs are plain data, and `choose` obeys what was forced, else the rule."""

import pickle
import threading

import pytest
import torch

from fastweights.autotune import Config, Device, Space, choose, use_config

WIDE = Config.make(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=3)
NARROW = Config.make(BLOCK_M=64, BLOCK_N=32)
STRANGE = Config.make(BLOCK_M=16, BLOCK_N=16)
HOPPER = Device("sm_90", shared_bytes=227 << 10)
ADA = Device("sm_89", shared_bytes=99 << 10)


def fits(config, key, device):
    (head_dim,) = key
    needed = config["BLOCK_N"] * head_dim * 2 * 2 * config.num_stages
    if needed > device.shared_bytes:
        return f"needs {needed} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def make_space(pass_="fwd", backend="triton"):
    return Space(
        op="probe",
        pass_=pass_,
        backend=backend,
        configs=(WIDE, NARROW),
        fits=fits,
        bucket=lambda shape: (shape[-1],),
        default=lambda key, device: WIDE if device.capability >= 90 else NARROW,
    )


def test_config_is_data():
    again = Config.make(num_stages=3, BLOCK_N=128, num_warps=8, BLOCK_M=128)
    assert again == WIDE
    assert len({again, WIDE, NARROW}) == 2
    assert pickle.loads(pickle.dumps(WIDE)) == WIDE
    assert (WIDE["BLOCK_M"], WIDE.get("SPLIT"), WIDE.get("SPLIT", 4)) == (128, 0, 4)
    with pytest.raises(KeyError, match="SPLIT"):
        WIDE["SPLIT"]
    with pytest.raises(AttributeError):
        WIDE.num_warps = 4


def test_config_names_tell_configs_apart():
    configs = [
        WIDE,
        NARROW,
        Config.make(BLOCK_M=128, BLOCK_N=128, num_warps=4, num_stages=3),
        Config.make(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2),
        Config.make(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=3, TMA=True),
    ]
    assert len({config.name for config in configs}) == len(configs)
    assert WIDE.name == "bm128-bn128-w8-s3"


def test_device_limits():
    cpu = Device.of(torch.device("cpu"))
    assert (cpu.arch, cpu.capability) == ("cpu", 0)
    assert make_space().fitting((256,), cpu) == [WIDE, NARROW]
    assert [HOPPER.capability, ADA.capability, Device("sm_90a", 1).capability] == [90, 89, 90]


@pytest.mark.gpu
def test_device_of_a_gpu():
    device = Device.of(torch.device("cuda"))
    major, minor = torch.cuda.get_device_capability()
    assert device.arch == f"sm_{major}{minor}"
    assert device.shared_bytes >= 48 << 10
    assert device.multiprocessors > 1


def test_fitting_drops_what_the_device_cannot_hold():
    space = make_space()
    assert space.fitting((128,), HOPPER) == [WIDE, NARROW]
    assert space.fitting((128,), ADA) == [NARROW]


def test_choose_follows_the_closed_form_rule():
    assert choose(make_space(), (128,), HOPPER) == WIDE
    assert choose(make_space(), (128,), ADA) == NARROW


def test_use_config_forces_nests_and_ends():
    space = make_space()
    with use_config(space, NARROW):
        assert choose(space, (128,), HOPPER) == NARROW
        with use_config(space, WIDE):
            assert choose(space, (128,), HOPPER) == WIDE
        assert choose(space, (128,), HOPPER) == NARROW
    assert choose(space, (128,), HOPPER) == WIDE


def test_use_config_ends_after_an_error():
    space = make_space()

    def fail():
        with use_config(space, NARROW):
            raise OSError("inside")

    with pytest.raises(OSError, match="inside"):
        fail()
    assert choose(space, (128,), HOPPER) == WIDE


def test_use_config_touches_its_own_space_only():
    forward, backward, cuda = make_space(), make_space("bwd"), make_space(backend="cuda")
    with use_config(forward, NARROW):
        assert choose(backward, (128,), HOPPER) == WIDE
        assert choose(cuda, (128,), HOPPER) == WIDE


def test_forced_config_reaches_other_threads():
    space, seen = make_space(), []
    with use_config(space, NARROW):
        thread = threading.Thread(target=lambda: seen.append(choose(space, (128,), HOPPER)))
        thread.start()
        thread.join()
    assert seen == [NARROW], "backward runs in another thread and has to see the same config"


def test_forced_config_is_never_replaced_in_silence():
    space = make_space()
    with (
        pytest.raises(ValueError, match="bm16-bn16-w4-s2 is not in probe/fwd"),
        use_config(space, STRANGE),
    ):
        pass
    with use_config(space, WIDE), pytest.raises(ValueError, match="196608 bytes of shared memory"):
        choose(space, (128,), ADA)
