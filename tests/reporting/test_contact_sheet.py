"""The PNG contains the given images at the right places."""

import numpy as np
import pytest
from PIL import Image

from ssl_jax.reporting import contact_sheet


def test_each_image_is_at_the_right_place(tmp_path):
  rows = np.random.default_rng(0).integers(0, 256, (2, 3, 5, 4, 3), np.uint8)
  path = contact_sheet.draw(rows, tmp_path / 'new' / 'views.png', scale=3)
  sheet = np.asarray(Image.open(path))
  gap, height, width = contact_sheet.GAP, 15 + 2 * contact_sheet.GAP, 12 + 2 * contact_sheet.GAP
  assert sheet.shape == (2 * height, 3 * width, 3)
  for row in range(2):
    for column in range(3):
      tile = sheet[row * height : (row + 1) * height, column * width : (column + 1) * width]
      np.testing.assert_array_equal(tile[gap:-gap, gap:-gap], np.kron(rows[row, column], np.ones((3, 3, 1), np.uint8)))
      assert np.all(tile[:gap] == 255) and np.all(tile[:, -gap:] == 255)


def test_floats_are_clipped_and_grey_is_grey(tmp_path):
  rows = np.array([-1.0, 0.0, 0.5, 1.0, 7.0, np.nan], np.float32).reshape(1, 1, 2, 3, 1)
  sheet = np.asarray(Image.open(contact_sheet.draw(rows, tmp_path / 'views.png', scale=1)))[2:-2, 2:-2]
  np.testing.assert_array_equal(sheet[..., 0], [[0, 0, 128], [255, 255, 0]])
  np.testing.assert_array_equal(sheet[..., 1:], sheet[..., :1].repeat(2, axis=-1))


def test_labels_are_left_of_their_rows(tmp_path):
  rows = np.full((3, 2, 40, 40, 3), 200, np.uint8)
  plain = np.asarray(Image.open(contact_sheet.draw(rows, tmp_path / 'plain.png', scale=1)))
  path = contact_sheet.draw(
    rows, tmp_path / 'labels.png', scale=1, labels=['image 0\ncat', '', 'image 80\na long name']
  )
  sheet = np.asarray(Image.open(path))
  strip, images = np.split(sheet, [sheet.shape[1] - plain.shape[1]], axis=1)
  np.testing.assert_array_equal(images, plain)
  ink = [(row < 128).any() for row in np.split(strip, 3)]
  assert ink == [True, False, True]


def test_labels_may_have_letters_that_are_not_english(tmp_path):
  rows = np.full((2, 1, 40, 40, 3), 200, np.uint8)
  sheet = np.asarray(Image.open(contact_sheet.draw(rows, tmp_path / 'labels.png', scale=1, labels=['ü', 'é'])))
  first, second = np.split(sheet, 2)
  assert (first != second).any()  # a missing letter is the same box


@pytest.mark.parametrize('side, expected', [(32, 96), (96, 96), (224, 224)])
def test_small_images_are_enlarged(tmp_path, side, expected):
  path = contact_sheet.draw(np.zeros((1, 1, side, side, 3)), tmp_path / 'views.png')
  assert np.asarray(Image.open(path)).shape[:2] == (expected + 2 * contact_sheet.GAP,) * 2


def test_enlarging_repeats_pixels():
  image = np.arange(4).reshape(1, 2, 2, 1)
  np.testing.assert_array_equal(contact_sheet.enlarge(image, 4)[0, ..., 0], np.kron([[0, 1], [2, 3]], np.ones((2, 2))))
  np.testing.assert_array_equal(contact_sheet.enlarge(image, 3)[0, ..., 0], [[0, 0, 1], [0, 0, 1], [2, 2, 3]])


@pytest.mark.parametrize('shape', [(2, 3, 5, 4), (1, 1, 5, 4, 2), (0, 3, 5, 4, 3)])
def test_another_shape_is_refused(tmp_path, shape):
  with pytest.raises(ValueError, match=r'^rows: shape \(.*\), expected \[rows, columns, H, W, C\]'):
    contact_sheet.draw(np.zeros(shape), tmp_path / 'views.png')
