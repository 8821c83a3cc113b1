"""`worldmodel train`: VAE, teacher and student on simulated episodes or recorded drives, stage after stage."""
from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

CALIBRATION_SHARE = 0.03  # of the episodes: not trained on, but used to calibrate the contact probability

EXAMPLES = """examples:
  # simulate (once), then train everything; ten minutes on one H100
  python -m worldmodel_ros.sim.rollout --episodes 3000 --steps 120 --out data/train
  python -m worldmodel_ros.sim.rollout --episodes 200 --steps 120 --first-seed 1000000 --out data/eval
  worldmodel train --data data/train --eval-data data/eval --out out/tiny

  # go on from a model, with its VAE
  worldmodel train --data data/more --init out/tiny/final --out out/tiny2

  # fine-tune on recorded drives, which have no labels: the heads for actions and contacts stay as they are
  worldmodel export drive1 drive2 --out data/drives
  worldmodel train --data data/drives --init worldmodel_ros/weights/tiny --out out/finetuned

  # the same on two CPU cores, to see it work
  worldmodel train --data data/train --out out/try --minutes 2 2 2 --batch 8 --no-compile
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument('--preset', default='tiny', help='size of the model (default: tiny)')
    parser.add_argument('--data', type=Path, nargs='+', required=True, metavar='FOLDER',
                        help='folder of simulated training episodes, or one or several LeRobot datasets')
    parser.add_argument('--eval-data', type=Path,
                        help='folder of simulated episodes of other seeds; metrics.json is made on them')
    parser.add_argument('--out', type=Path, required=True, help='folder for checkpoints, logs, curves and metrics')
    parser.add_argument('--init', type=Path, help='start from this checkpoint and keep its VAE: no stage `vae`')
    parser.add_argument('--minutes', type=float, nargs=3, default=(2.5, 7.0, 6.0), metavar=('VAE', 'TEACHER', 'STUDENT'),
                        help='time of each stage, compilation not counted (default: 2.5 7 6)')
    parser.add_argument('--steps', type=int, nargs=3, metavar=('VAE', 'TEACHER', 'STUDENT'),
                        help='steps of each stage instead of minutes: repeatable to the bit on one machine')
    parser.add_argument('--batch', type=int, default=96, help='clips per step of the DiT (default: 96)')
    parser.add_argument('--vae-batch', type=int, default=256, help='clips per step of the VAE (default: 256)')
    parser.add_argument('--rate', type=float, default=1e-3, help='peak learning rate of the DiT (default: 1e-3)')
    parser.add_argument('--device', default='auto', help='cuda, cpu or auto (default)')
    parser.add_argument('--no-compile', action='store_true', help='run without torch.compile')
    parser.add_argument('--seed', type=int, default=0, help='seed of weights and batches (default: 0)')


def load_data(folders: list[Path], device: str, preset):
    """Episodes of one folder of the simulator, or of LeRobot datasets. Ends the program if they cannot be used."""
    from . import lerobot
    from .data import Episodes
    if not any(map(lerobot.is_dataset, folders)) and len(folders) == 1:
        return Episodes.load(folders[0], device)
    try:
        return lerobot.load(folders, device, preset)
    except lerobot.DatasetError as error:
        raise SystemExit(f'worldmodel train: {error}') from error


def main(arguments: argparse.Namespace) -> int:
    import torch

    from ..model import checkpoint
    from ..model.checkpoint_description import read_description
    from ..model.presets import PRESETS
    from ..model.world_model import WorldModel
    from . import curves, metrics
    from .calibrate import calibrate
    from .data import Episodes
    from .log import Log
    from .vae import train_vae
    from .world import frozen_copy, train_world

    if arguments.preset not in PRESETS:
        raise SystemExit(f'worldmodel train: unknown preset {arguments.preset!r}; known: {", ".join(PRESETS)}')
    device = arguments.device
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision('high')
    out: Path = arguments.out
    episodes, held_back = load_data(arguments.data, device, PRESETS[arguments.preset]), None
    if episodes.labelled:
        episodes, held_back = episodes.split(CALIBRATION_SHARE)
    model = WorldModel(PRESETS[arguments.preset]).to(device)
    limits = arguments.steps or (None, None, None)
    common = {'compile_model': not arguments.no_compile, 'seed': arguments.seed}
    seconds = [60.0 * m for m in arguments.minutes]
    took: dict[str, float] = {}

    def run(stage: str, work) -> None:
        """A stage whose checkpoint exists is loaded instead of run again."""
        folder = out / stage
        if (folder / 'model.json').is_file():
            model.load_state_dict(checkpoint.load(folder).state_dict())
            print(f'[{stage}] taken from {folder}')
            return
        start = time.monotonic()
        work(Log(out, stage))
        took[stage] = round(time.monotonic() - start, 1)
        checkpoint.save(model, folder, {'stage': stage, 'seconds': took[stage]}, dtype=torch.float32)

    if arguments.init:
        model.load_state_dict(checkpoint.load(arguments.init).state_dict())
    else:
        run('vae', lambda log: train_vae(model.vae, episodes, seconds[0], log, batch=arguments.vae_batch,
                                         limit=limits[0], **common))
    model.eval()
    episodes.encode(model.vae)
    run('teacher', lambda log: train_world(model, episodes, seconds[1], log, batch=arguments.batch, rate=arguments.rate,
                                           limit=limits[1], **common))
    teacher = frozen_copy(model)
    run('student', lambda log: train_world(model, episodes, seconds[2], log, teacher=teacher, batch=arguments.batch,
                                           rate=0.5 * arguments.rate, limit=limits[2], **common))
    accelerator = torch.cuda.get_device_name() if device == 'cuda' else platform.processor() or platform.machine()
    before = [read_description(arguments.init).provenance] if arguments.init else []
    provenance = {'continues': before, 'stages_s': took, 'device': accelerator, 'torch': torch.__version__,
                  'seed': arguments.seed,
                  'episodes': len(episodes), 'frames': episodes.frame_count}
    if held_back:
        held_back.encode(model.vae)
        provenance['contact_calibration'] = calibrate(model, held_back)
    checkpoint.save(model, out / 'final', provenance)
    curves.draw(out, out / 'curves.png')
    if arguments.eval_data:
        held_out = Episodes.load(arguments.eval_data, device)
        # What is judged is what is shipped: the stored weights, read back.
        shipped = checkpoint.load(out / 'final', device)
        held_out.encode(shipped.vae)
        result = {'device': accelerator, 'stages_s': took, **metrics.evaluate(shipped, held_out)}
        (out / 'metrics.json').write_text(json.dumps(result, indent=1) + '\n')
        print(json.dumps(result['psnr_db'], indent=1))
        print(json.dumps(result['heads']))
    return 0


if __name__ == '__main__':
    parser = argparse.ArgumentParser(prog='worldmodel train', description=__doc__)
    add_arguments(parser)
    raise SystemExit(main(parser.parse_args()))
