"""The classification study of the paper: CIFAR-10 with VGG16."""
