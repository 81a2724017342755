"""``python -m xinfer_vk``"""

from xinfer_vk.cli.main import main

main()
