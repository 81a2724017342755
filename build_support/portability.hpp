// Included before Kompute's files. Kompute 0.9 makes its instance without asking for portability drivers, and then
// the Vulkan loader does not list them: MoltenVK, on which every Mac depends. A layer is called too late for this.
#include <cstring>
#include <vector>
#include <vulkan/vulkan.h>

#ifdef VK_KHR_portability_enumeration
inline VkResult xinferCreateInstance(
    const VkInstanceCreateInfo *info, const VkAllocationCallbacks *allocator, VkInstance *out)
{
    uint32_t count = 0;
    vkEnumerateInstanceExtensionProperties(nullptr, &count, nullptr);
    std::vector<VkExtensionProperties> offered(count);
    if (count)
        vkEnumerateInstanceExtensionProperties(nullptr, &count, offered.data());
    bool known = false;
    for (uint32_t i = 0; i < count && i < offered.size(); i++)
        known |= !std::strcmp(offered[i].extensionName, VK_KHR_PORTABILITY_ENUMERATION_EXTENSION_NAME);
    if (!known)
        return vkCreateInstance(info, allocator, out);

    std::vector<const char *> names(
        info->ppEnabledExtensionNames, info->ppEnabledExtensionNames + info->enabledExtensionCount);
    names.push_back(VK_KHR_PORTABILITY_ENUMERATION_EXTENSION_NAME);
    VkInstanceCreateInfo extended = *info;
    extended.flags |= VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR;
    extended.enabledExtensionCount = static_cast<uint32_t>(names.size());
    extended.ppEnabledExtensionNames = names.data();
    return vkCreateInstance(&extended, allocator, out);
}
// vulkan.hpp calls it by this name.
#define vkCreateInstance xinferCreateInstance
#endif
