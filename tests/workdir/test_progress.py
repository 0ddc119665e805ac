"""What a run prints at its end."""

import pytest

from ssl_jax.workdir import progress


@pytest.mark.parametrize(
  ('files', 'summary', 'modes'),
  [
    ([], {'knn5': 50.0}, ['evaluate', 'report']),
    (['evaluation.json'], {'knn5': 50.0}, ['report']),
    (['evaluation_photos.json'], {'knn5': 50.0}, ['report']),
    ([], {}, ['report']),  # without labels, an evaluation would be an error
  ],
)
def test_the_next_commands_are_printed(files, summary, modes, tmp_path, capsys):
  workdir = tmp_path / 'a run'
  workdir.mkdir()
  for name in files:
    (workdir / name).touch()
  progress.finish(workdir, summary)
  lines = [line for line in capsys.readouterr().out.splitlines() if 'python main.py' in line]
  assert [line.split('python main.py ')[1] for line in lines] == [f"--mode={m} --workdir='{workdir}'" for m in modes]
