"""Working in container images.

test_layer_files    workspaces compared by their layers, and diffs of plain changes
test_plain_diffs    diffs that git makes of contents, in a workspace that conversations share
test_layers         layers that are hostile, damaged or of other formats
test_shared_layers  layers that several images have, which are on disk once
test_bases          images whose history is removed once for many conversations
test_image_files    files inside, as the file tools use them
test_image_sandbox  commands in an image, and what they cannot reach
test_task_runs      runs of software-engineering tasks, from their rows to their rewards
test_leaks          runs whose model looks for the fix in the history of the repository
test_replaced_images  runs whose images are replaced between two starts
test_diffs          what a conversation changed, as fresh checks judge it
test_image_urls     images in a bucket
test_image_runs     runs whose rows name images: checks, diffs, kills and resumes
test_entrypoints    what images start by themselves
test_agent_images   agents that are commands, in the images of their rows
test_podman_agents  agents that are commands, in containers of a real Podman
test_podman_runs    the same runs in containers of a real Podman
test_ray_runs       the same runs on nodes of a Ray cluster
test_image_urls     images in a bucket
test_dockerfile     the image of the program itself
"""
