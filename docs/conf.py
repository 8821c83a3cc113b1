"""Configuration of Sphinx for the documentation site; tools/docs_site.py prepares the sources and starts the build."""
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

project = 'worldmodel_ros'
author = 'worldmodel_ros maintainers'
project_copyright = author
release = version = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['version']

extensions = ['myst_parser', 'sphinx_external_toc', 'sphinx_copybutton']
myst_enable_extensions = ['attrs_block', 'colon_fence']
myst_heading_anchors = 6  # GitHub's, so that links work on both
# Prose has ``...`` and quotes as code has them; and 3 x 4 is no abbreviation.
smartquotes = False
suppress_warnings = [
    'ref.python',        # two modules may have a class of one name
    'myst.strikethrough',
]
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = 'hide'
external_toc_path = '_toc.yml'
copybutton_exclude = '.linenos, .gp, .go'

html_theme = 'furo'
html_title = f'worldmodel_ros {version}'
html_static_path = ['_static']
html_css_files = ['site.css']
html_copy_source = False
html_theme_options = {'navigation_with_keys': True}
