"""A copy of Megatron-Core that can start ncclep on Transformer Engine 2.19 and newer with torch 2.11: two small edits.

    python -m benchmarks.ncclep_patch FOLDER
    PYTHONPATH=FOLDER:... LD_PRELOAD=.../nvidia/nccl/lib/libnccl.so.2 NCCL_HOME=.../nvidia/nccl benchmarks/two_gpus.sh

Megatron-Core 0.19.2 does not say `num_topk`, which Transformer Engine requires from 2.19 on; 2.17 and 2.18, which do
not, compile NCCL EP's kernels at run time from sources that their wheels leave out. So no released pair starts ncclep.
The copy calls itself 0.19.2+ncclep, in its metadata and so in every row. torch 2.11 loads NCCL 2.28.9 from its own
RPATH, which LD_LIBRARY_PATH does not override: a newer NCCL goes into its place, or is preloaded.
"""

import argparse
import shutil
from importlib.metadata import distribution
from pathlib import Path

from search_spaces.rules.ncclep import PATCHED

PLACE = Path("megatron/core/transformer/moe")
# file in PLACE -> (as it is, as it must be), each exactly once
EDITS: dict[str, tuple[tuple[str, str], ...]] = {
    "fused_a2a.py": (
        ("    hidden_dim,\n    num_sms=0,\n    zero_copy=False,\n):",
         "    hidden_dim,\n    num_sms=0,\n    zero_copy=False,\n    num_topk=0,\n):"),
        ("        zero_copy=zero_copy,\n    )\n\n\ndef nccl_ep_finalize",
         "        zero_copy=zero_copy,\n        num_topk=num_topk,\n    )\n\n\ndef nccl_ep_finalize"),
        ("try:\n    from transformer_engine.pytorch import ep as te_ep\n\n    HAVE_TE_EP = True\n",
         "try:\n    from megatron.core.transformer.moe.ncclep_ops import omitted_arguments\n\n"
         "    with omitted_arguments():\n        from transformer_engine.pytorch import ep as te_ep\n\n"
         "    HAVE_TE_EP = True\n"),
    ),
    "token_dispatcher.py": (
        ("            zero_copy=self.zero_copy,\n        )\n        if self.zero_copy and",
         "            zero_copy=self.zero_copy,\n            num_topk=self.router_topk,\n"
         "        )\n        if self.zero_copy and"),
    ),
}  # fmt: skip

OPS_FILE, OPS = (
    "ncclep_ops.py",
    '''"""torch's custom operators whose optional arguments are written to."""

from contextlib import contextmanager

from torch._library import utils


@contextmanager
def omitted_arguments():
    """Inside the block operators are defined so that an optional written argument may be left out, and is None.

    torch 2.10 and 2.11 look for every written argument in the call and end in an IndexError (pytorch issue 176078).
    What is left out needs no new version; where it is given, its version counter stays, which autograd does not read
    for a buffer that nothing saves.
    """
    every = utils.mutated_args_kwargs

    def required(schema):
        places, names = every(schema)
        return [each for each in places if not schema.arguments[each].has_default_value()], names

    utils.mutated_args_kwargs = required
    try:
        yield
    finally:
        utils.mutated_args_kwargs = every
''',
)


def patched(text: str, edits: tuple[tuple[str, str], ...]) -> str:
    """Raises ValueError where the text is not Megatron-Core 0.19.2's."""
    for before, after in edits:
        if text.count(before) != 1:
            raise ValueError(f"not as in Megatron-Core 0.19.2: {before.strip()!r} is there {text.count(before)} times")
        text = text.replace(before, after)
    return text


def copy_to(folder: Path) -> str:
    """Copy what is installed into `folder` and patch it; returns the copy's version.

    Raises ValueError where it is not Megatron-Core 0.19.2 as released, and FileExistsError where there is a copy.
    """
    installed = distribution("megatron-core")
    version = f"{installed.version}{PATCHED}"
    root = Path(str(installed.locate_file("")))
    texts = {name: patched((root / PLACE / name).read_text(encoding="utf-8"), edits) for name, edits in EDITS.items()}
    shutil.copytree(root / "megatron", folder / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in texts.items():
        (folder / PLACE / name).write_text(text, encoding="utf-8")
    (folder / PLACE / OPS_FILE).write_text(OPS, encoding="utf-8")
    info = folder / f"megatron_core-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n")
    return version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="goes first on PYTHONPATH")
    options = parser.parse_args()
    try:
        print(f"{options.folder}: megatron-core {copy_to(options.folder)}")
    except (ValueError, FileExistsError) as error:
        parser.error(f"{error}; give a folder without a copy, and an installed release")


if __name__ == "__main__":
    main()
